"""org.avocado.Agent1 on the system bus: translates calls into requests and records into properties; decides nothing.

The contract is units/dbus-1/interfaces/org.avocado.Agent1.xml. Who may call what is decided in callers.py. Errors carry
the name of their code and the four fields as JSON. A change's object stays until the next change begins, so that nobody
misses its end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Annotated, Any

from dbus_fast import DBusError, NameFlag, PropertyAccess, RequestNameReply, Variant
from dbus_fast.aio import MessageBus
from dbus_fast.annotations import DBusDict, DBusObjectPath, DBusSignature, DBusStr, DBusUInt32, DBusUInt64
from dbus_fast.service import ServiceInterface, dbus_method, dbus_property, dbus_signal

from agent.callers import Gate
from agent.change.record import ChangeRecord, Outcome
from agent.contract.errors import ErrorCode, OperationError, printable
from agent.contract.status import progress_of
from agent.plan import ChangeKind
from agent.requests import Ask, Changes

NAME = "org.avocado.Agent1"
PATH = "/org/avocado/Agent1"
MANAGER = "org.avocado.Agent1.Manager"
CHANGE = "org.avocado.Agent1.Change"
NO_CHANGE = "/"

DBusNothing = Annotated[None, DBusSignature("")]

_BYTES_EVERY_S = 0.2
_LOG = logging.getLogger("avocado.bus")


@contextlib.contextmanager
def _as_bus_errors() -> Iterator[None]:
    try:
        yield
    except OperationError as error:
        raise DBusError(error.dbus_name, json.dumps(error.as_dict())) from error
    except DBusError:
        raise
    except Exception as cause:
        _LOG.exception("a call on the bus failed")
        internal = OperationError(
            ErrorCode.INTERNAL, f"cannot answer: {cause!r}", "See the agent's log: journalctl -b -n 50 -u avocadod"
        )
        raise DBusError(internal.dbus_name, json.dumps(internal.as_dict())) from cause


class Board:
    """What the Manager asks of the daemon beside changes."""

    def __init__(
        self,
        describe: Callable[[], Awaitable[str]],
        history: Callable[[int], str],
        active: Callable[[], str | None],
        remove: Callable[[str], Awaitable[None]],
        version: str,
    ) -> None:
        self.describe = describe
        self.history = history
        self.active = active
        self.remove = remove
        self.version = version


class Manager(ServiceInterface):
    """The Manager interface."""

    def __init__(self, gate: Gate, board: Board, changes: Changes) -> None:
        super().__init__(MANAGER)
        self._gate = gate
        self._board = board
        self._changes = changes

    @dbus_property(PropertyAccess.READ, "Version")
    async def version(self) -> DBusStr:
        """The agent's version."""
        with _as_bus_errors():
            await self._gate.reader()
            return self._board.version

    @dbus_property(PropertyAccess.READ, "ActiveRuntime")
    async def active_runtime(self) -> DBusStr:
        """The active runtime's id, or the empty string."""
        with _as_bus_errors():
            await self._gate.reader()
            return self._board.active() or ""

    @dbus_property(PropertyAccess.READ, "RunningChange")
    async def running_change(self) -> DBusObjectPath:
        """The running change's path, or /."""
        with _as_bus_errors():
            await self._gate.reader()
            running = self._changes.running
            return change_path(running.number) if running else NO_CHANGE

    @dbus_method("Describe")
    async def describe(self) -> DBusStr:
        """The status document as JSON."""
        with _as_bus_errors():
            await self._gate.reader()
            return await self._board.describe()

    @dbus_method("ListChanges")
    async def list_changes(self, limit: DBusUInt32) -> DBusStr:
        """JSON array of change records, newest first."""
        with _as_bus_errors():
            await self._gate.reader()
            return self._board.history(limit)

    @dbus_method("Deploy")
    async def deploy(self, source: DBusStr, options: DBusDict) -> DBusObjectPath:
        """Fetch a signed runtime and change to it."""
        return await self._begin(ChangeKind.DEPLOY, options, source=source)

    @dbus_method("Activate")
    async def activate(self, runtime: DBusStr, options: DBusDict) -> DBusObjectPath:
        """Change to a runtime on disk."""
        return await self._begin(ChangeKind.ACTIVATE, options, runtime=runtime)

    @dbus_method("Rollback")
    async def rollback(self, runtime: DBusStr, options: DBusDict) -> DBusObjectPath:
        """Change back to the previous runtime, or to a named one."""
        return await self._begin(ChangeKind.ROLLBACK, options, runtime=runtime)

    @dbus_method("Merge")
    async def merge(self, options: DBusDict) -> DBusObjectPath:
        """Merge the active runtime's set."""
        return await self._begin(ChangeKind.MERGE, options)

    @dbus_method("Unmerge")
    async def unmerge(self, options: DBusDict) -> DBusObjectPath:
        """Unmerge everything."""
        return await self._begin(ChangeKind.UNMERGE, options)

    @dbus_method("Refresh")
    async def refresh(self, options: DBusDict) -> DBusObjectPath:
        """Make the running set what the active runtime names."""
        return await self._begin(ChangeKind.REFRESH, options)

    @dbus_method("Enable")
    async def enable(self, extension: DBusStr, options: DBusDict) -> DBusObjectPath:
        """Bring back an extension that was disabled here."""
        return await self._begin(ChangeKind.ENABLE, options, extension=extension)

    @dbus_method("Disable")
    async def disable(self, extension: DBusStr, options: DBusDict) -> DBusObjectPath:
        """Change to a local runtime without that extension."""
        return await self._begin(ChangeKind.DISABLE, options, extension=extension)

    @dbus_method("Remove")
    async def remove(self, runtime: DBusStr) -> DBusNothing:
        """Delete a runtime."""
        with _as_bus_errors():
            await self._gate.changer()
            await self._board.remove(runtime)

    @dbus_method("Confirm")
    async def confirm(self, change: DBusObjectPath) -> DBusNothing:
        """End a commit-confirmed change."""
        with _as_bus_errors():
            await self._gate.changer()
            number = change.removeprefix(f"{PATH}/change/")
            if not number.isdecimal() or change_path(int(number)) != change:
                raise OperationError(ErrorCode.USAGE, f"cannot confirm {change}: it is no change of this agent")
            self._changes.confirm(int(number))

    @dbus_signal("ChangeAdded")
    def change_added(self, change: str) -> DBusObjectPath:
        """A change has begun."""
        return change

    @dbus_signal("ChangeRemoved")
    def change_removed(self, change: str, outcome: str) -> Annotated[list[str], DBusSignature("os")]:
        """A change has ended."""
        return [change, outcome]

    async def _begin(
        self,
        kind: ChangeKind,
        options: dict[str, Variant],
        *,
        runtime: str = "",
        source: str = "",
        extension: str = "",
    ) -> str:
        with _as_bus_errors():
            who = await self._gate.changer()
            values = {name: variant.value for name, variant in options.items()}
            unknown = sorted(set(values) - {"dry_run", "requested_by", "await_host", "warm_up"})
            if unknown:
                raise OperationError(ErrorCode.USAGE, f"cannot use option {unknown[0]}: this agent does not know it")
            asked_by = printable(str(values.get("requested_by", ""))[:64])
            ask = Ask(
                kind=kind,
                requested_by=f"{who} ({asked_by})" if asked_by else who,
                runtime=runtime,
                source=source,
                extension=extension,
                dry_run=values.get("dry_run") is True,
                await_host=values.get("await_host") is True,
                warm_up=said if isinstance(said := values.get("warm_up"), bool) else None,
            )
            return change_path((await self._changes.begin(ask)).number)


class Change(ServiceInterface):
    """One change's interface, over its newest record."""

    def __init__(self, gate: Gate, changes: Changes, record: ChangeRecord) -> None:
        super().__init__(CHANGE)
        self._gate = gate
        self._changes = changes
        self.record = record

    @dbus_property(PropertyAccess.READ, "Number")
    async def number(self) -> DBusUInt32:
        """Its number in the journal."""
        return (await self._read()).number

    @dbus_property(PropertyAccess.READ, "Kind")
    async def kind(self) -> DBusStr:
        """What was asked for."""
        return (await self._read()).kind

    @dbus_property(PropertyAccess.READ, "State")
    async def state(self) -> DBusStr:
        """How it stands."""
        return str(shown(await self._read())["State"])

    @dbus_property(PropertyAccess.READ, "Step")
    async def step(self) -> DBusStr:
        """The step being done or undone."""
        return str(shown(await self._read())["Step"])

    @dbus_property(PropertyAccess.READ, "Progress")
    async def progress(self) -> Annotated[list[Any], DBusSignature("(isi)")]:
        """Percentage, message, nesting depth."""
        return list(shown(await self._read())["Progress"])

    @dbus_property(PropertyAccess.READ, "BytesDone")
    async def bytes_done(self) -> DBusUInt64:
        """Bytes fetched."""
        return int(shown(await self._read())["BytesDone"])

    @dbus_property(PropertyAccess.READ, "BytesTotal")
    async def bytes_total(self) -> DBusUInt64:
        """Bytes to fetch."""
        return int(shown(await self._read())["BytesTotal"])

    @dbus_property(PropertyAccess.READ, "Error")
    async def error(self) -> Annotated[list[str], DBusSignature("(sss)")]:
        """Code, message, remedy."""
        return list(shown(await self._read())["Error"])

    @dbus_method("Describe")
    async def describe(self) -> DBusStr:
        """The record as the journal has it."""
        return json.dumps((await self._read()).as_dict())

    @dbus_method("Cancel")
    async def cancel(self) -> DBusNothing:
        """Stop before the switch, or while the change waits for a confirmation."""
        with _as_bus_errors():
            await self._gate.changer()
            self._changes.cancel(self.record.number)

    async def _read(self) -> ChangeRecord:
        with _as_bus_errors():
            await self._gate.reader()
            return self.record


def change_path(number: int) -> str:
    """The object path of a change."""
    return f"{PATH}/change/{number}"


def shown(record: ChangeRecord) -> dict[str, Any]:
    """A record as the properties that can change."""
    reason = record.reason
    step = record.step
    percentage, text = progress_of(record.as_dict())
    return {
        "State": record.outcome.value,
        "Step": step.kind if step else "",
        "Progress": [percentage, text, 1],
        "BytesDone": int(record.facts.get("bytes_done", 0)),
        "BytesTotal": int(record.facts.get("bytes_total", 0)),
        "Error": [reason.code.value, reason.message, reason.remedy] if reason else ["", "", ""],
    }


class AgentBus:
    """The objects on one connection: the manager, and the change that runs or ran last."""

    def __init__(self, bus: MessageBus, board: Board, changes: Changes) -> None:
        self._bus = bus
        self._gate = Gate(bus)
        self._changes = changes
        self._manager = Manager(self._gate, board, changes)
        self._change: Change | None = None
        self._told: dict[str, Any] = {}
        self._bytes_told_at = 0.0

    async def appear(self) -> None:
        """Export the manager and own the name. Raises `internal` when somebody else does."""
        self._bus.export(PATH, self._manager)
        reply = await self._bus.request_name(NAME, NameFlag.DO_NOT_QUEUE)
        if reply not in (RequestNameReply.PRIMARY_OWNER, RequestNameReply.ALREADY_OWNER):
            raise OperationError(
                ErrorCode.INTERNAL,
                f"cannot serve {NAME}: another process owns the name",
                "Find it: busctl status org.avocado.Agent1",
            )

    def news(self, record: ChangeRecord) -> None:
        """A record has changed: tell whoever listens what is different."""
        change = self._change
        if change is None or change.record.number != record.number:
            change = self._replace(record)
        elif record == change.record:
            return
        change.record = record
        properties = shown(record)
        different = {name: value for name, value in properties.items() if self._told.get(name) != value}
        if set(different) <= {"BytesDone", "Progress"} and time.monotonic() - self._bytes_told_at < _BYTES_EVERY_S:
            return  # a fast link would make thousands of signals
        self._bytes_told_at = time.monotonic()
        self._told = properties
        if different:
            change.emit_properties_changed(different)
        if "State" in different and record.outcome is not Outcome.RUNNING:
            self._manager.change_removed(change_path(record.number), record.outcome.value)
            self._manager.emit_properties_changed({"RunningChange": NO_CHANGE})

    def _replace(self, record: ChangeRecord) -> Change:
        if self._change is not None:
            self._bus.unexport(change_path(self._change.record.number), self._change)
        self._change = Change(self._gate, self._changes, record)
        self._told = {}
        path = change_path(record.number)
        self._bus.export(path, self._change)
        self._manager.change_added(path)
        self._manager.emit_properties_changed({"RunningChange": path})
        return self._change

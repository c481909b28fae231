"""A connection to the agent: one call, or a change followed to its end.

Errors of the agent arrive as the same OperationError it raised. A change is followed by its signals; its record is read
after each, and every second besides, so that an agent that ends while somebody watches is noticed. Its next start takes
the change up again, so it is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from dbus_fast import BusType, Message, MessageType, Variant
from dbus_fast.aio import MessageBus

from agent.contract.errors import DBUS_PREFIX, ErrorCode, OperationError
from agent.verbs.show import print_json, size, tell_it_goes_on

NAME = "org.avocado.Agent1"
PATH = "/org/avocado/Agent1"
MANAGER = "org.avocado.Agent1.Manager"
CHANGE = "org.avocado.Agent1.Change"

_CONNECT_TIMEOUT_S = 5.0
_CALL_TIMEOUT_S = 25.0
_LOOK_AGAIN_S = 1.0
_STATUS_TIMEOUT_S = 5.0
_BACK_WITHIN_S = 20.0
_GONE = (
    "org.freedesktop.DBus.Error.ServiceUnknown",
    "org.freedesktop.DBus.Error.NameHasNoOwner",
    "org.freedesktop.DBus.Error.NoReply",
)
_UNKNOWN = "org.freedesktop.DBus.Error.Unknown"  # Object, Interface, Method: a change that has left the bus

Record = dict[str, Any]


class AgentClient:
    """The agent on the system bus, for one command."""

    def __init__(self, bus: MessageBus) -> None:
        self._bus = bus
        self._news = asyncio.Event()

    @classmethod
    async def connect(cls) -> AgentClient:
        """Connect. Raises `agent-unreachable` when there is no system bus."""
        try:
            bus = await asyncio.wait_for(MessageBus(bus_type=BusType.SYSTEM).connect(), _CONNECT_TIMEOUT_S)
        except (OSError, TimeoutError) as cause:
            raise OperationError(
                ErrorCode.AGENT_UNREACHABLE,
                f"cannot reach the system bus: {cause or 'no answer'}",
                "Run it on the board, or give the board: -H root@board",
            ) from cause
        client = cls(bus)
        bus.add_message_handler(client._on_message)
        return client

    def close(self) -> None:
        """The connection is gone."""
        self._bus.disconnect()

    def _on_message(self, message: Message) -> None:
        if message.message_type is MessageType.SIGNAL and (message.path or "").startswith(PATH):
            self._news.set()

    async def call(
        self,
        member: str,
        signature: str = "",
        body: list[Any] | None = None,
        *,
        path: str = PATH,
        interface: str = MANAGER,
        timeout_s: float = _CALL_TIMEOUT_S,
    ) -> list[Any]:
        """One method call. Raises the agent's own error, `not-permitted` or `agent-unreachable`."""
        message = Message(
            destination=NAME, path=path, interface=interface, member=member, signature=signature, body=body or []
        )
        try:
            reply = await asyncio.wait_for(self._bus.call(message), timeout_s)
        except TimeoutError as cause:
            raise _unreachable(f"no answer in {timeout_s:g} s") from cause
        if reply is None or reply.message_type is MessageType.ERROR:
            raise _error_of(reply, "" if path != PATH else member)
        return list(reply.body)

    async def subscribe(self) -> None:
        """Signals of the agent wake `news` from now on."""
        rule = f"type='signal',sender='{NAME}',path_namespace='{PATH}'"
        message = Message(
            destination="org.freedesktop.DBus",
            path="/org/freedesktop/DBus",
            interface="org.freedesktop.DBus",
            member="AddMatch",
            signature="s",
            body=[rule],
        )
        await asyncio.wait_for(self._bus.call(message), _CALL_TIMEOUT_S)

    async def news(self) -> None:
        """Return at the next signal, or a moment later without one."""
        try:
            await asyncio.wait_for(self._news.wait(), _LOOK_AGAIN_S)
        except TimeoutError:
            return
        self._news.clear()

    async def record(self, change: str) -> Record:
        """A change's record as it stands."""
        record: Record = json.loads((await self.call("Describe", path=change, interface=CHANGE))[0])
        return record

    async def follow(self, change: str, tell: Callable[[Record], None]) -> Record:
        """Tell every new state of a change until it ends, and give its last record. Raises `not-found`."""
        try:
            record = await self.record(change)
        except OperationError as error:
            if error.code is not ErrorCode.AGENT_UNREACHABLE:
                raise
            record = await self._record_again(change)
        while True:
            tell(record)
            if record["outcome"] != "running":
                await self._bring_status_up_to_date()
                return record
            await self.news()
            record = await self._record_again(change)

    async def _bring_status_up_to_date(self) -> None:
        """Whoever types `avocadoctl status` next reads the file, which must not show this change as it ran."""
        with contextlib.suppress(OperationError):
            await self.call("Describe", timeout_s=_STATUS_TIMEOUT_S)

    async def _record_again(self, change: str) -> Record:
        """The record of a change that was there, past an end of the agent."""
        deadline = time.monotonic() + _BACK_WITHIN_S
        while True:
            try:
                return await self.record(change)
            except OperationError as error:
                # Not found: it is back, and has not yet read what it left.
                if error.code not in (ErrorCode.AGENT_UNREACHABLE, ErrorCode.NOT_FOUND):
                    raise
                if time.monotonic() >= deadline:
                    number = change.rpartition("/")[2]
                    raise OperationError(
                        error.code,
                        f"cannot follow change {number}: the agent went away and said nothing of it"
                        f" for {_BACK_WITHIN_S:g} s",
                        f"See how it ended: avocadoctl history show {number}",
                    ) from error
            await asyncio.sleep(_LOOK_AGAIN_S)


def _error_of(reply: Message | None, of_manager: str) -> OperationError:
    if reply is None:
        return _unreachable("no answer")
    name = reply.error_name or ""
    text = reply.body[0] if reply.body and isinstance(reply.body[0], str) else ""
    if name.startswith(DBUS_PREFIX):
        try:
            return OperationError.from_dict(json.loads(text))
        except (ValueError, AttributeError):
            return OperationError(ErrorCode.INTERNAL, f"cannot understand the agent's error {name}: {text}")
    if name == "org.freedesktop.DBus.Error.AccessDenied":
        return OperationError(
            ErrorCode.NOT_PERMITTED,
            "cannot ask the agent: permission denied",
            "Run it as root; members of the group avocado may read.",
        )
    if name.startswith(_UNKNOWN) and of_manager:
        return OperationError(
            ErrorCode.UNSUPPORTED,
            f"cannot ask for {of_manager}: the agent that runs does not know it so",
            "Start the agent that is merged: systemctl restart avocadod",
        )
    if name.startswith(_UNKNOWN):
        return OperationError(
            ErrorCode.NOT_FOUND,
            "cannot find that change: it neither runs nor is the one that ran last",
            "See which there are: avocadoctl history",
        )
    if name in _GONE:
        return _unreachable("nobody owns org.avocado.Agent1")
    return OperationError(ErrorCode.INTERNAL, f"cannot ask the agent: {name}: {text}")


def _unreachable(why: str) -> OperationError:
    return OperationError(
        ErrorCode.AGENT_UNREACHABLE, f"cannot reach the agent: {why}", "See why: systemctl status avocadod"
    )


def options_for(*, warm_up: bool | None = None, **wanted: bool) -> dict[str, Variant]:
    """The options of a request; an agent that does not know one is asked for it only where it is wanted.

    `warm_up`: None leaves it to the board.
    """
    said = {} if warm_up is None else {"warm_up": Variant("b", warm_up)}
    return said | {name: Variant("b", True) for name, is_wanted in wanted.items() if is_wanted}


def run_change(member: str, signature: str, body: list[Any], *, as_json: bool) -> int:
    """Ask for a change, show its steps on stderr while it runs, and print how it ended."""
    record = asyncio.run(_run_change(member, signature, body))
    error = error_of_record(record)
    if as_json:
        print_json(record)
    elif error is None:
        print(closing_line(record))
    if error is not None:
        raise error
    return 0


async def _run_change(member: str, signature: str, body: list[Any]) -> Record:
    client = await AgentClient.connect()
    try:
        await client.subscribe()
        # The agent answers once the plan stands, and a plan may have to fetch signed metadata first.
        change = (await client.call(member, signature, body, timeout_s=600.0))[0]
        try:
            return await client.follow(change, step_teller())
        except asyncio.CancelledError:  # Ctrl-C
            tell_it_goes_on(int(change.rpartition("/")[2]))
            raise
    finally:
        client.close()


def step_teller() -> Callable[[Record], None]:
    """A function that writes each new step of a record to stderr, once."""
    last = ""

    def tell(record: Record) -> None:
        nonlocal last
        moving = [step for step in record["steps"] if step["phase"] in ("doing", "undoing")]
        if moving:
            line = f"{'undo ' if moving[-1]['phase'] == 'undoing' else ''}{moving[-1]['kind']}"
            if line != last:
                print(f"#{record['number']} {line}", file=sys.stderr)
                last = line

    return tell


def closing_line(record: Record) -> str:
    """How a change ended, in one line."""
    facts = record["facts"]
    text = f"change #{record['number']} {record['kind']}: {record['outcome']}"
    if record["outcome"] == "planned":
        steps = planned(record)
        return f"{text}; it would run {steps}" if steps else f"{text}; there is nothing to do"
    if facts.get("image_bytes"):
        text += f", moved {size(facts.get('moved_bytes', 0))} of {size(facts['image_bytes'])}"
    if isinstance(facts.get("away_s"), (int, float)):
        text += f", service away {facts['away_s']:.2f} s"
    if facts.get("backend"):
        text += f", on {facts['backend']}"
    return text


def planned(record: Record) -> str:
    """The steps of a dry run, with the units that would stop."""
    return ", ".join(
        f"{step['kind']} ({', '.join(units)})"
        if step["kind"] == "stop_services" and (units := step["inputs"].get("units"))
        else str(step["kind"])
        for step in record["facts"].get("plan") or ()
    )


def error_of_record(record: Record) -> OperationError | None:
    """Why a change did not reach what was asked, or None when it did."""
    if record["outcome"] in ("applied", "running", "planned"):
        return None
    reason = record["reason"]
    if reason:
        return OperationError.from_dict({**reason, "facts": {"change": record["number"]}})
    code = {"cancelled": ErrorCode.CHANGE_CANCELLED, "stuck": ErrorCode.CHANGE_STUCK}.get(
        record["outcome"], ErrorCode.CHANGE_REVERTED
    )
    return OperationError(
        code,
        f"cannot finish change #{record['number']}: it is {record['outcome']}",
        f"See why: avocadoctl history show {record['number']}",
    )

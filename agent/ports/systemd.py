"""systemd's manager, over D-Bus: units reach a state, commands run as transient units of PID 1.

A job is awaited by its JobRemoved signal, subscribed before the call, so that a job which ends at once is not missed.
Property signals repeat and carry stale values; a state is therefore always read after the job, never taken from a
signal. Everything that must act on the board's own mount namespace goes through here, since the daemon is sandboxed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from dbus_fast import Message, MessageType, Variant
from dbus_fast.aio import MessageBus

from agent.contract.errors import ErrorCode, OperationError
from agent.health import HAS_TO_RUN
from agent.ports.peer import BUS_NAME, BUS_PATH, Peer, PeerError, call
from agent.ports.protocols import Relations, UnitState

NAME = "org.freedesktop.systemd1"
PATH = "/org/freedesktop/systemd1"
MANAGER = "org.freedesktop.systemd1.Manager"
UNIT = "org.freedesktop.systemd1.Unit"
SERVICE = "org.freedesktop.systemd1.Service"
NO_SUCH_UNIT = "org.freedesktop.systemd1.NoSuchUnit"

# Where systemd keeps its state over a reload, which it refuses with less (RELOAD_DISK_SPACE_MIN in dbus-manager.c).
_RELOADS_IN = Path("/run/systemd")
_RELOAD_BYTES = 16 << 20
_DISK_FULL = "org.freedesktop.systemd1.DiskFull"

_KILL_TIMEOUT_S = 10.0
_CALL_TIMEOUT_S = 10.0
_STOPPED_WITH = ("RequiredBy", "BoundBy", "ConsistsOf")  # Requires=, BindsTo=, PartOf= from the other end
_JOB_MATCH = f"type='signal',sender='{NAME}',interface='{MANAGER}',member='JobRemoved'"
_TOOL_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


class SystemdUnits:
    """The Units port. Make one with `connect`, on the event loop; call the port's methods from any other thread."""

    def __init__(self, bus: MessageBus, loop: asyncio.AbstractEventLoop) -> None:
        self._peer = Peer(bus, loop, NAME, PATH, MANAGER)
        self._bus = bus
        self._watchers: list[asyncio.Queue[tuple[str, str]]] = []

    @classmethod
    async def connect(cls, bus: MessageBus) -> SystemdUnits:
        """Subscribe to systemd's signals and give the adapter."""
        units = cls(bus, asyncio.get_running_loop())
        bus.add_message_handler(units._on_message)
        match = Message(
            destination=BUS_NAME, path=BUS_PATH, interface=BUS_NAME, member="AddMatch", signature="s", body=[_JOB_MATCH]
        )
        await call(bus, match, _CALL_TIMEOUT_S)
        await units._peer.ask("Subscribe", timeout_s=_CALL_TIMEOUT_S)
        return units

    def _on_message(self, message: Message) -> None:
        if message.message_type is MessageType.SIGNAL and message.member == "JobRemoved" and len(message.body) == 4:
            for watcher in self._watchers:
                watcher.put_nowait((message.body[1], message.body[3]))

    # -- the Units port

    def states(self, names: Sequence[str]) -> dict[str, UnitState]:
        """The state of each unit; a unit nobody knows has load `not-found`."""
        return self._peer.wait(self.read_states(list(names)), _CALL_TIMEOUT_S)

    def relations(self, names: Sequence[str]) -> dict[str, Relations]:
        """What each unit has to do with others, as systemd has read their files; a unit nobody knows is left out."""
        return self._peer.wait(self._read_relations(list(names)), _CALL_TIMEOUT_S)

    def start(self, name: str, timeout_s: float) -> None:
        """The unit is active. Raises `unit-failed` or `step-timeout`."""
        # The whole is as long as its parts, so that a part that is late says which it was.
        self._peer.wait(self._start(name, timeout_s), timeout_s + 2 * _CALL_TIMEOUT_S)

    def stop(self, name: str, timeout_s: float) -> None:
        """The unit is inactive or failed; a unit that does not exist counts as stopped."""
        self._peer.wait(self._stop(name, timeout_s), timeout_s + _KILL_TIMEOUT_S + 2 * _CALL_TIMEOUT_S)

    def require_reload(self) -> None:
        """systemd would read its unit files again if it were asked now. Raises `no-space`."""
        try:
            figures = os.statvfs(_RELOADS_IN)
        except OSError:  # systemd's own folder is not there: then nobody can tell
            return
        if figures.f_bfree * figures.f_frsize < _RELOAD_BYTES:
            raise _no_room(f"fewer than {_RELOAD_BYTES >> 20} MiB are free on {_RELOADS_IN}")

    def reload_manager(self, timeout_s: float) -> None:
        """systemd has read its unit files again (daemon-reload), and the bus its policy."""
        self._peer.wait(self._reload_manager(timeout_s), timeout_s)

    def run(self, argv: Sequence[str], timeout_s: float) -> None:
        """A command has run as a transient unit of PID 1, outside the agent's sandbox, with exit status 0.

        The facts of its `unit-failed` have the `exit_status` of a command that ended by itself.
        """
        self._peer.wait(self._run(list(argv), timeout_s), timeout_s + 2 * _CALL_TIMEOUT_S)

    def goes_down(self) -> bool:
        """The board is being shut down: systemd stops units that nobody asked to stop, and starts none."""
        try:
            said = self._peer.wait(
                self._peer.properties(PATH, MANAGER, ["SystemState"], timeout_s=_CALL_TIMEOUT_S), _CALL_TIMEOUT_S
            )
        except (PeerError, OperationError):
            return False
        return bool(said["SystemState"] == "stopping")

    # -- what only the overlay adapter asks for

    def reload_or_restart(self, name: str, timeout_s: float) -> None:
        """The unit has reloaded, or was started if it was not running. Raises `unit-failed`."""
        self._peer.wait(self._job(name, "ReloadOrRestartUnit", "ss", [name, "replace"], timeout_s), timeout_s)

    def bind_read_only(self, what: str, unit: str, timeout_s: float) -> None:
        """The folder `what` is bind-mounted, read-only, where the mount unit's name says; a reboot forgets it."""
        properties = [
            ["What", Variant("s", what)],
            ["Type", Variant("s", "none")],
            ["Options", Variant("s", "bind,ro")],
            ["Description", Variant("s", "Extensions on trial")],
        ]
        body = [unit, "replace", properties, []]
        self._peer.wait(self._job(unit, "StartTransientUnit", "ssa(sv)a(sa(sv))", body, timeout_s), timeout_s)

    # -- what only the rehearsal asks for

    def start_transient(self, name: str, properties: list[list[Any]], timeout_s: float) -> None:
        """A transient unit has been started with these properties. Raises `unit-failed` or `step-timeout`."""
        body = [name, "fail", properties, []]
        self._peer.wait(self._job(name, "StartTransientUnit", "ssa(sv)a(sa(sv))", body, timeout_s), timeout_s)

    def settings(self, name: str, wanted: list[str]) -> dict[str, Any]:
        """Some settings of a loaded service, as systemd has read its files. Raises `unit-failed`."""
        return self._peer.wait(self._read_settings(name, wanted), 2 * _CALL_TIMEOUT_S)

    def files(self, name: str) -> tuple[str, list[str]]:
        """The file that systemd has read for a loaded unit, and the drop-ins. Raises `unit-failed`."""
        said = self._peer.wait(self._read_settings(name, ["FragmentPath", "DropInPaths"], UNIT), 2 * _CALL_TIMEOUT_S)
        return said["FragmentPath"], said["DropInPaths"]

    def forget(self, name: str) -> None:
        """How the unit ended was read; a transient one is gone."""
        self._peer.wait(self._forget(name), _CALL_TIMEOUT_S)

    def loaded_like(self, pattern: str) -> list[str]:
        """Names of loaded units that match a shell pattern and are active or on their way."""
        rows = self._peer.wait(
            self._peer.ask("ListUnitsByPatterns", "asas", [[], [pattern]], timeout_s=_CALL_TIMEOUT_S), _CALL_TIMEOUT_S
        )
        return sorted(row[0] for row in rows[0] if row[3] not in ("inactive", "failed"))

    # -- on the event loop

    async def read_states(self, names: list[str]) -> dict[str, UnitState]:
        """`states`, for callers on the event loop."""
        if not names:
            return {}
        rows = (await self._peer.ask("ListUnitsByNames", "as", [names], timeout_s=_CALL_TIMEOUT_S))[0]
        states = await asyncio.gather(*(self._read_state(row) for row in rows))
        found = {state.name: state for state in states}
        return {name: found.get(name) or _unknown(name) for name in names}

    async def _read_state(self, row: list[Any]) -> UnitState:
        name, description, load, active, sub, _following, path = row[:7]
        result, pid, restarts, is_job, spares = "", 0, 0, False, False
        if name.endswith(".service") and load == "loaded":
            wanted = ["Result", "MainPID", "NRestarts", "Type", "RemainAfterExit", "KillMode"]
            try:
                details = await self._peer.properties(path, SERVICE, wanted, timeout_s=_CALL_TIMEOUT_S)
                result, pid, restarts = details["Result"], details["MainPID"], details["NRestarts"]
                is_job = details["Type"] == "oneshot" and not details["RemainAfterExit"]
                spares = details["KillMode"] in ("process", "none")
            except PeerError:  # unloaded between the two calls
                return _unknown(name)
        return UnitState(name, load, active, sub, result, pid, restarts, description, is_job, spares)

    async def _read_relations(self, names: list[str]) -> dict[str, Relations]:
        if not names:
            return {}
        rows = (await self._peer.ask("ListUnitsByNames", "as", [names], timeout_s=_CALL_TIMEOUT_S))[0]
        known = {row[0]: row[6] for row in rows if row[2] == "loaded"}
        found = await asyncio.gather(*(self._read_relation(path) for path in known.values()))
        return {name: relations for name, relations in zip(known, found, strict=True) if relations is not None}

    async def _read_relation(self, path: str) -> Relations | None:
        try:
            said = await self._peer.properties(path, UNIT, ["After", *_STOPPED_WITH], timeout_s=_CALL_TIMEOUT_S)
        except PeerError:  # unloaded between the two calls
            return None
        return Relations(frozenset(said["After"]), frozenset(name for key in _STOPPED_WITH for name in said[key]))

    async def _read_settings(self, name: str, wanted: list[str], interface: str = SERVICE) -> dict[str, Any]:
        rows = (await self._peer.ask("ListUnitsByNames", "as", [[name]], timeout_s=_CALL_TIMEOUT_S))[0]
        try:
            return await self._peer.properties(rows[0][6], interface, wanted, timeout_s=_CALL_TIMEOUT_S)
        except PeerError as cause:
            raise _unit_failed(name, f"its settings cannot be read: {cause.text}") from cause

    async def _start(self, name: str, timeout_s: float) -> None:
        # A crash loop of the set before this one must not count against the start limit of this one.
        await self._forget(name)
        await self._job(name, "StartUnit", "ss", [name, "replace"], timeout_s)
        state = (await self.read_states([name]))[name]
        if state.active == "inactive" and state.result == "success":
            raise _unit_failed(name, f"it has ended, and {HAS_TO_RUN}")
        if state.active not in ("active", "reloading"):
            raise _unit_failed(name, f"it is {state.active} ({state.sub}) after its start, result {state.result}")

    async def _stop(self, name: str, timeout_s: float) -> None:
        try:
            await self._job(name, "StopUnit", "ss", [name, "replace"], timeout_s)
        except _UnknownUnitError:
            return
        except OperationError as late:
            if late.code is not ErrorCode.STEP_TIMEOUT:
                raise
            # A service that ignores SIGTERM must not hold the board between two sets, however long it gives itself.
            await self._kill(name)
        state = (await self.read_states([name]))[name]
        if state.load != "not-found" and state.active not in ("inactive", "failed"):
            raise _unit_failed(name, f"it is {state.active} ({state.sub}) after its stop")

    async def _kill(self, name: str) -> None:
        try:
            await self._peer.ask("KillUnit", "ssi", [name, "all", signal.SIGKILL], timeout_s=_CALL_TIMEOUT_S)
        except PeerError as cause:
            raise _unit_failed(name, f"it can be neither stopped nor killed: {cause.text}") from cause
        # Joins the stop that is still under way, and is told its end.
        await self._job(name, "StopUnit", "ss", [name, "replace"], _KILL_TIMEOUT_S)

    async def _reload_manager(self, timeout_s: float) -> None:
        await self._translated("reload systemd", self._peer.ask("Reload", timeout_s=timeout_s))
        # dbus-daemon does not watch the folders of a merged /usr.
        reload = Message(destination=BUS_NAME, path=BUS_PATH, interface=BUS_NAME, member="ReloadConfig")
        await self._translated("reload the bus policy", call(self._bus, reload, timeout_s))

    async def _run(self, argv: list[str], timeout_s: float) -> None:
        program = shutil.which(argv[0], path=_TOOL_PATH)
        if program is None:
            raise OperationError(ErrorCode.TOOL_MISSING, f"cannot run {argv[0]}: it is not installed on this board")
        unit = f"avocado-run-{secrets.token_hex(6)}.service"
        properties = [
            ["Description", Variant("s", f"avocadod: {' '.join(argv)[:200]}")],
            ["Type", Variant("s", "oneshot")],
            ["ExecStart", Variant("a(sasb)", [[program, argv, False]])],
            ["TimeoutStartUSec", Variant("t", int(timeout_s * 1_000_000))],
        ]
        try:
            body = [unit, "fail", properties, []]
            await self._job(unit, "StartTransientUnit", "ssa(sv)a(sa(sv))", body, timeout_s)
        except OperationError as cause:
            if cause.code is not ErrorCode.UNIT_FAILED:
                raise
            state = (await self.read_states([unit]))[unit]
            raise OperationError(
                ErrorCode.UNIT_FAILED,
                f"cannot run {' '.join(argv)}: {state.result or cause.message}",
                f"See why: journalctl -b -n 30 -u {unit}",
                await self._exit_status(unit) if state.result == "exit-code" else {},
            ) from cause
        finally:
            await self._forget(unit)

    async def _exit_status(self, unit: str) -> dict[str, Any]:
        try:
            return {"exit_status": (await self._read_settings(unit, ["ExecMainStatus"]))["ExecMainStatus"]}
        except OperationError:  # systemd forgot it meanwhile
            return {}

    async def _forget(self, unit: str) -> None:
        # A transient unit that failed stays loaded until somebody says that its result was read.
        try:
            await self._peer.ask("ResetFailedUnit", "s", [unit], timeout_s=_CALL_TIMEOUT_S)
        except PeerError as gone:
            if gone.name != NO_SUCH_UNIT:
                raise OperationError(ErrorCode.INTERNAL, f"cannot forget unit {unit}: {gone.text}") from gone

    async def _job(self, name: str, member: str, signature: str, body: list[Any], timeout_s: float) -> None:
        result = await self._result_of_job(name, member, signature, body, timeout_s)
        if result == "frozen":  # `systemctl freeze`: systemd moves nothing that cannot run
            await self._thaw(name)
            result = await self._result_of_job(name, member, signature, body, timeout_s)
        if result == "canceled":
            raise OperationError(
                ErrorCode.UNIT_FAILED,
                f"cannot bring unit {name} to its state: somebody else started or stopped it meanwhile",
                f"Ask again, and leave {name} alone until the change has ended.",
                {"unit": name},
            )
        if result != "done":
            raise _unit_failed(name, f"its job ended with {result!r}")

    async def _thaw(self, name: str) -> None:
        try:
            await self._peer.ask("ThawUnit", "s", [name], timeout_s=_CALL_TIMEOUT_S)
        except PeerError as cause:
            raise _unit_failed(name, f"it is frozen and cannot be thawed: {cause.text}") from cause

    async def _result_of_job(self, name: str, member: str, signature: str, body: list[Any], timeout_s: float) -> str:
        ended: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self._watchers.append(ended)
        try:
            job = (await self._peer.ask(member, signature, body, timeout_s=timeout_s))[0]
            return await asyncio.wait_for(_result_of(job, ended.get), timeout_s)
        except PeerError as cause:
            if cause.name == NO_SUCH_UNIT:
                raise _UnknownUnitError(name) from cause
            raise _unit_failed(name, cause.text) from cause
        except TimeoutError as cause:
            raise OperationError(
                ErrorCode.STEP_TIMEOUT,
                f"cannot wait for unit {name} any longer: its job was not done after {timeout_s:g} s",
                f"See why: journalctl -b -n 30 -u {name}",
            ) from cause
        finally:
            self._watchers.remove(ended)

    async def _translated(self, what: str, work: Awaitable[list[Any]]) -> None:
        try:
            await work
        except PeerError as cause:
            if cause.name == _DISK_FULL:
                raise _no_room(cause.text) from cause
            raise OperationError(ErrorCode.UNIT_FAILED, f"cannot {what}: {cause.text}") from cause


async def _result_of(job: str, get: Callable[[], Awaitable[tuple[str, str]]]) -> str:
    while True:
        path, result = await get()
        if path == job:
            return result


class _UnknownUnitError(OperationError):
    """systemd has no unit of that name."""

    def __init__(self, name: str) -> None:
        super().__init__(
            ErrorCode.UNIT_FAILED,
            f"cannot find unit {name}: systemd has no unit of that name",
            f"See what systemd knows: systemctl cat {name}",
        )


def _unknown(name: str) -> UnitState:
    return UnitState(name, "not-found", "inactive", "dead", "", 0, 0)


def _no_room(why: str) -> OperationError:
    return OperationError(
        ErrorCode.NO_SPACE,
        f"cannot reload systemd: {why}",
        "Free space on /run; see what is there: du -xsh /run/*",
    )


def _unit_failed(name: str, why: str) -> OperationError:
    return OperationError(
        ErrorCode.UNIT_FAILED,
        f"cannot bring unit {name} to its state: {why}",
        f"See why: journalctl -b -n 30 -u {name}",
        {"unit": name},
    )

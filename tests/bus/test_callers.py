"""Who may call what, with a bus policy that lets everybody through: the agent's own check is what refuses."""

from __future__ import annotations

import asyncio
import grp
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from dbus_fast import BusType, DBusError, Message, MessageType
from dbus_fast.aio import MessageBus
from dbus_fast.annotations import DBusSignature, DBusStr, DBusUInt32
from dbus_fast.service import ServiceInterface, dbus_method

from agent import callers
from agent.bus import AgentBus, Board, change_path
from agent.change.record import ChangeRecord, Outcome
from agent.contract.errors import ErrorCode, OperationError
from agent.ports import polkit
from tests.bus.calls import NAME, PATH, Call, calls, table
from tests.bus.private_bus import private_bus

THREAT_MODEL = Path(__file__).resolve().parents[2] / "docs/threat-model.md"
STRANGER = 65534
NUMBER = 7
NOT_PERMITTED = "org.avocado.Error.NotPermitted"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


class NoChanges:
    """Answers like an agent with nothing to do, and notes that it was asked to change something."""

    running = None

    def __init__(self) -> None:
        self.asked = 0

    async def begin(self, ask: object) -> ChangeRecord:
        return self._refuse()

    def cancel(self, number: int) -> None:
        self._refuse()

    def _refuse(self) -> Any:
        self.asked += 1
        raise OperationError(ErrorCode.NOT_FOUND, "cannot change anything here")


def record() -> ChangeRecord:
    made = ChangeRecord(
        number=NUMBER, kind="refresh", boot_id="x", requested_by="root", from_runtime=None, to_runtime=None,
        steps=(), started_at="2026-11-30T22:00:00Z",
    )  # fmt: skip
    return replace(made, outcome=Outcome.APPLIED)


@pytest.fixture
def address() -> Iterator[str]:
    # Not tmp_path: nobody but root gets into that.
    with tempfile.TemporaryDirectory(prefix="avocado-bus-") as folder:
        Path(folder).chmod(0o755)
        with private_bus(Path(folder)) as found:
            yield found


class Polkit(ServiceInterface):
    """polkit's place on the bus, with an answer that a test sets: a yes, a no, an error, or none at all."""

    def __init__(self, answer: str) -> None:
        super().__init__("org.freedesktop.PolicyKit1.Authority")
        self.answer = answer
        self.asked: list[tuple[Any, ...]] = []

    async def appear(self, address: str) -> None:
        self._bus = await MessageBus(address, bus_type=BusType.SYSTEM).connect()
        self._bus.export("/org/freedesktop/PolicyKit1/Authority", self)
        await self._bus.request_name("org.freedesktop.PolicyKit1")

    def leave(self) -> None:
        self._bus.disconnect()

    @dbus_method("CheckAuthorization")
    async def check(
        self,
        subject: Annotated[list[Any], DBusSignature("(sa{sv})")],
        action: DBusStr,
        details: Annotated[dict[str, str], DBusSignature("a{ss}")],
        flags: DBusUInt32,
        cancellation: DBusStr,
    ) -> Annotated[list[Any], DBusSignature("(bba{ss})")]:
        self.asked.append((subject[0], action, flags))
        match self.answer:
            case "error":
                raise DBusError("org.freedesktop.PolicyKit1.Error.Failed", "Action is not registered")
            case "silence":
                await asyncio.Event().wait()
        # A challenge is not a yes: it would be one after a password.
        return [self.answer == "yes", self.answer == "challenge", {}]


class Caller:
    """A process of another user, made before anything else runs here, that makes every call once it is told to."""

    def __init__(self, address: str, user: int, groups: list[int]) -> None:
        self._go, self._answers = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setgroups(groups)
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
                os.read(self._go[0], 1)
                os.write(self._answers[1], json.dumps(asyncio.run(call_everything(address))).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(self._answers[1])

    def answers(self) -> dict[str, str]:
        """The error of each call, or the empty string. Blocks, so it belongs into a thread."""
        os.write(self._go[1], b"x")
        data = b""
        while part := os.read(self._answers[0], 65536):
            data += part
        assert os.waitpid(self.pid, 0)[1] == 0
        for descriptor in (*self._go, self._answers[0]):
            os.close(descriptor)
        found: dict[str, str] = json.loads(data)
        return found


async def call_everything(address: str) -> dict[str, str]:
    bus = await MessageBus(address, bus_type=BusType.SYSTEM).connect()
    found = {}
    for call in calls():
        reply = await asyncio.wait_for(bus.call(message(call)), 10)
        assert reply is not None
        found[call.name] = (reply.error_name or "") if reply.message_type is MessageType.ERROR else ""
    bus.disconnect()
    return found


def message(call: Call) -> Message:
    path = PATH if call.interface.endswith("Manager") else change_path(NUMBER)
    if call.is_property:
        return Message(
            destination=NAME,
            path=path,
            interface="org.freedesktop.DBus.Properties",
            member="Get",
            signature="ss",
            body=[call.interface, call.member],
        )
    return Message(
        destination=NAME,
        path=path,
        interface=call.interface,
        member=call.member,
        signature=call.signature,
        body=list(call.values),
    )


async def serve_and_ask(address: str, caller: Caller, authority: Polkit | None = None) -> tuple[dict[str, str], int]:
    """What the caller was answered, and how often the agent was asked for something that changes the board."""
    if authority is not None:
        await authority.appear(address)
    changes, removed = NoChanges(), 0

    async def describe() -> str:
        return "{}"

    async def remove(runtime: str) -> None:
        nonlocal removed
        removed += 1

    bus = await MessageBus(address, bus_type=BusType.SYSTEM).connect()
    agent = AgentBus(bus, Board(describe, lambda limit: "[]", lambda: None, remove, "1"), changes)  # type: ignore[arg-type]
    await agent.appear()
    agent.news(record())
    answers = await asyncio.to_thread(caller.answers)
    bus.disconnect()
    if authority is not None:
        authority.leave()
    return answers, changes.asked + removed


def test_a_stranger_is_refused_every_call(address: str) -> None:
    answers, changed = asyncio.run(serve_and_ask(address, Caller(address, STRANGER, [])))
    assert answers == {call.name: NOT_PERMITTED for call in calls()}
    assert changed == 0


def test_a_member_of_the_group_reads_and_changes_nothing(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A group this machine has, in the place of one that only a board has.
    group = grp.getgrnam("games")
    monkeypatch.setattr(callers, "GROUP", group.gr_name)
    answers, changed = asyncio.run(serve_and_ask(address, Caller(address, STRANGER, [group.gr_gid])))
    assert answers == {call.name: "" if call.reads else NOT_PERMITTED for call in calls()}
    assert changed == 0


def test_root_is_refused_nothing(address: str) -> None:
    answers, changed = asyncio.run(serve_and_ask(address, Caller(address, 0, [])))
    assert {name for name, error in answers.items() if error == NOT_PERMITTED} == set()
    assert {call.name for call in calls() if call.reads} <= {name for name, error in answers.items() if not error}
    # Confirm may be answered without asking for anything.
    assert changed >= sum(not call.reads for call in calls()) - 1


@pytest.mark.parametrize("answer", ["no", "challenge", "error", "silence"])
def test_without_a_yes_of_polkit_s_a_stranger_changes_nothing(
    address: str, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    monkeypatch.setattr(polkit, "TIMEOUT_S", 0.2)
    authority = Polkit(answer)
    answers, changed = asyncio.run(serve_and_ask(address, Caller(address, STRANGER, []), authority))
    assert answers == {call.name: NOT_PERMITTED for call in calls()}
    assert changed == 0
    assert set(authority.asked) == {("system-bus-name", "org.avocado.agent1.change", 0)}
    assert len(authority.asked) == sum(not call.reads for call in calls())


def test_whom_polkit_lets_may_change_the_board_and_reads_no_more_than_before(address: str) -> None:
    answers, changed = asyncio.run(serve_and_ask(address, Caller(address, STRANGER, []), Polkit("yes")))
    assert {name for name, error in answers.items() if error == NOT_PERMITTED} == {
        call.name for call in calls() if call.reads
    }
    assert changed >= sum(not call.reads for call in calls()) - 1


def test_polkit_is_not_asked_about_root(address: str) -> None:
    authority = Polkit("no")
    answers, _ = asyncio.run(serve_and_ask(address, Caller(address, 0, []), authority))
    assert NOT_PERMITTED not in answers.values()
    assert authority.asked == []


def test_the_documented_table_is_the_one_the_interface_makes() -> None:
    documented = [line for line in THREAT_MODEL.read_text().splitlines() if line.endswith("refused |")]
    assert documented == table()[2:]

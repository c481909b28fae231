"""A deploy's bridge: the real `receive`, a real bus, and an `ssh` on PATH that runs it here and fails on demand."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import shutil
import socket
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from dbus_fast import BusType, Message, MessageType
from dbus_fast.aio import MessageBus

from agent.contract.errors import ErrorCode, OperationError
from agent.host.deploy import carry
from agent.host.report import Report
from agent.host.ssh import Board, open_session
from tests.ports.board_by_ssh import BLOB, board_by_ssh

pytestmark = pytest.mark.skipif(shutil.which("dbus-daemon") is None, reason="dbus-daemon is not installed")

CHANGE_PATH = "/org/avocado/Agent1/change/7"


class FakeAgent:
    """Agent1 on a private bus: Deploy fetches what it is told to over the socket, and the change ends as it is told."""

    def __init__(self) -> None:
        self.fetched: list[tuple[str, int, str]] = []
        self.requests: list[tuple[str, dict[str, str]]] = [("/targets/blob", {})]
        self.options: dict[str, Any] = {}
        self.refuse_with: OperationError | None = None
        self.outcome = "applied"
        self.hang = False
        self.dies_in_fetch = False
        self._record: dict[str, Any] = {"number": 7, "outcome": "running", "steps": [], "facts": {}, "reason": None}

    async def join(self) -> MessageBus:
        bus = await MessageBus(bus_type=BusType.SYSTEM).connect()
        bus.add_message_handler(lambda message: self._answer(bus, message))
        await bus.request_name("org.avocado.Agent1")
        return bus

    def _answer(self, bus: MessageBus, message: Message) -> Message | bool | None:
        if message.message_type is not MessageType.METHOD_CALL:
            return None
        if message.member == "Deploy":
            task = asyncio.ensure_future(self._deploy(bus, message))
            task.add_done_callback(lambda done: done.result())
            return True
        if message.member == "Describe":
            return Message.new_method_return(message, "s", [json.dumps(self._record)])
        return None

    async def _deploy(self, bus: MessageBus, message: Message) -> None:
        source, options = message.body
        self.options = {name: value.value for name, value in options.items()}
        if self.refuse_with is not None:
            text = json.dumps(self.refuse_with.as_dict())
            await bus.send(Message.new_error(message, self.refuse_with.dbus_name, text))
            return
        await bus.send(Message.new_method_return(message, "o", [CHANGE_PATH]))
        await asyncio.to_thread(self._fetch, source.removeprefix("unix:"))
        if self.dies_in_fetch:
            bus.disconnect()
        elif not self.hang:
            self._record = {**self._record, "outcome": self.outcome, "facts": {"moved_bytes": 3}}

    def _fetch(self, path: str) -> None:
        connection = http.client.HTTPConnection("board", timeout=20)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(path)
        for name, headers in self.requests:
            connection.request("GET", name, headers=headers)
            answer = connection.getresponse()
            if self.dies_in_fetch:
                answer.read(1000)  # of many, which the host goes on sending
                break
            data = answer.read()
            self.fetched.append((name, answer.status, hashlib.sha256(data).hexdigest()))
        connection.close()


@pytest.fixture
def bus_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    config = tmp_path / "bus.conf"
    rules = "".join(
        f"<allow {rule}/>" for rule in ('send_destination="*"', 'receive_sender="*"', 'own="*"', 'user="*"')
    )
    config.write_text(
        f"<busconfig><type>session</type><listen>unix:path={tmp_path}/bus</listen><auth>EXTERNAL</auth>"
        f'<policy context="default">{rules}</policy></busconfig>'
    )
    daemon = subprocess.Popen(
        ["dbus-daemon", f"--config-file={config}", "--nofork", "--print-address=1"], stdout=subprocess.PIPE, text=True
    )
    assert daemon.stdout is not None
    address = daemon.stdout.readline().strip()
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", address)
    yield address
    daemon.terminate()
    daemon.wait(10)
    daemon.stdout.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return board_by_ssh(tmp_path, monkeypatch)


def with_agent(agent: FakeAgent, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def both() -> Any:
        bus = await agent.join()
        try:
            return await work()
        finally:
            bus.disconnect()

    return asyncio.run(both())


def carried(agent: FakeAgent, folder: Path, *, dry_run: bool = False, warm_up: bool | None = None) -> dict[str, Any]:
    result: dict[str, Any] = with_agent(
        agent,
        lambda: carry(Board("root@board"), folder, Report(quiet=True), dry_run=dry_run, warm_up=warm_up),
    )
    return result


@pytest.mark.parametrize("case", ["none", "before", "json", "after", "status"])
def test_a_deploy_arrives_whole_whatever_the_login_shell_prints(
    bus_address: str, folder: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setenv("CASE", case)
    agent = FakeAgent()
    result = carried(agent, folder)
    assert agent.fetched == [("/targets/blob", 200, hashlib.sha256(BLOB).hexdigest())]
    assert (result["change"]["outcome"], result["error"]) == ("applied", None)
    assert agent.options["dry_run"] is False
    assert "warm_up" not in agent.options  # an agent that does not know it would refuse the deploy
    assert "@" in agent.options["requested_by"]
    assert list((folder.parent / "run").iterdir()) == []


def test_one_connection_serves_ranges_and_survives_every_odd_request(bus_address: str, folder: Path) -> None:
    agent = FakeAgent()
    agent.requests = [
        ("/targets/blob", {"Range": "bytes=256-511"}),
        ("/targets/blob", {"Range": "bytes=99999999-"}),
        ("/targets/none", {}),
        ("/../secret", {}),
        ("/targets/%2e%2e/%2e%2e/secret", {}),
        ("/targets", {}),
        ("/targets/" + "n" * 300, {}),
        ("/targets/a%00b", {}),
        ("/targets/blob", {}),
    ]
    carried(agent, folder)
    assert [status for _, status, _ in agent.fetched] == [206, 416, 404, 404, 404, 404, 404, 404, 200]
    assert agent.fetched[0][2] == hashlib.sha256(bytes(range(256))).hexdigest()
    assert agent.fetched[-1][2] == hashlib.sha256(BLOB).hexdigest()


def test_a_refusal_of_the_agent_arrives_as_the_same_error(bus_address: str, folder: Path) -> None:
    agent = FakeAgent()
    agent.refuse_with = OperationError(
        ErrorCode.CHANGE_RUNNING, "cannot deploy: change #6 runs", "Wait.", {"change": 6}
    )
    result = carried(agent, folder, dry_run=True, warm_up=True)
    assert result["error"] == agent.refuse_with.as_dict()
    assert agent.options["dry_run"] is True
    assert agent.options["warm_up"] is True
    carried(agent, folder, warm_up=False)
    assert agent.options["warm_up"] is False


def test_without_an_agent_it_says_so(bus_address: str, folder: Path) -> None:
    result = asyncio.run(carry(Board("root@board"), folder, Report(quiet=True)))
    assert result["error"]["message"] == "cannot reach the agent: nobody owns org.avocado.Agent1"


def test_a_link_that_drops_during_a_change_says_where_to_look(bus_address: str, folder: Path) -> None:
    agent = FakeAgent()
    agent.hang = True

    async def dropped() -> None:
        async with open_session(Board("root@board"), ["avocadoctl", "receive"]) as session:
            await session.handshake()
            async for event in session.events():
                assert event["event"] == "progress"
                if session._process.returncode is None:
                    session._process.kill()

    with pytest.raises(OperationError) as caught:
        agent.requests = []
        with_agent(agent, dropped)
    assert caught.value.code is ErrorCode.SSH_FAILED
    assert caught.value.message == "cannot follow the change on root@board: the connection was lost"
    assert caught.value.remedy == "See how it ended: avocadoctl -H root@board history"


def test_a_change_that_goes_on_without_its_link_is_asked_for_again(
    bus_address: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "status.json").write_text('{"number": 7, "outcome": "applied", "facts": {"moved_bytes": 3}}')
    monkeypatch.setenv("CASE", "dropped")
    agent = FakeAgent()
    agent.hang = True
    agent.requests = []
    result = carried(agent, folder)
    assert (result["change"]["outcome"], result["error"]) == ("applied", None)
    assert "avocadoctl -o json history show 7" in (folder.parent / "ssh.log").read_text()


def test_an_agent_that_is_killed_in_the_middle_says_at_its_next_start_how_the_change_ended(
    bus_address: str, folder: Path
) -> None:
    killed = FakeAgent()
    killed.dies_in_fetch = True
    moving = {"kind": "fetch_images", "phase": "doing"}
    killed._record |= {"steps": [moving], "facts": {"bytes_done": 4, "bytes_total": 10}}
    message = "cannot finish change 7: the agent was restarted before activation"
    reason = {"code": "change-reverted", "message": message, "remedy": "Ask for the change again."}

    async def scenario() -> dict[str, Any]:
        bus = await killed.join()
        carrying = asyncio.create_task(carry(Board("root@board"), folder, Report(quiet=True)))
        await asyncio.wait_for(bus.wait_for_disconnect(), 20)
        assert not carrying.done()
        started_again = FakeAgent()
        started_again._record |= {"outcome": "reverted", "reason": reason}
        again = await started_again.join()
        try:
            return await asyncio.wait_for(carrying, 20)
        finally:
            again.disconnect()

    result = asyncio.run(scenario())
    assert (result["error"], result["change"]["outcome"], result["change"]["reason"]) == (None, "reverted", reason)


def test_the_host_that_goes_after_its_agent_is_missed_all_the_same(bus_address: str, folder: Path) -> None:
    agent = FakeAgent()
    agent.dies_in_fetch = True

    async def vanish() -> int:
        bus = await agent.join()
        process = await asyncio.create_subprocess_exec(
            "avocadoctl", "receive", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        assert process.stdin and process.stdout
        await asyncio.wait_for(process.stdout.readuntil(b"\n"), 10)
        await asyncio.wait_for(process.stdout.readuntil(b"\r\n\r\n"), 10)
        process.stdin.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4000000\r\n\r\n" + bytes(4000000))
        await asyncio.wait_for(bus.wait_for_disconnect(), 10)
        await asyncio.wait_for(process.stdin.drain(), 10)
        process.stdin.close()
        return await asyncio.wait_for(process.wait(), 10)

    assert asyncio.run(vanish()) == 50


def test_receive_ends_by_itself_when_the_host_is_gone(bus_address: str, folder: Path) -> None:
    agent = FakeAgent()
    agent.hang = True
    agent.requests = []

    async def vanish() -> int:
        process = await asyncio.create_subprocess_exec(
            "avocadoctl", "receive", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin and process.stdout and process.stderr
        await asyncio.wait_for(process.stdout.readuntil(b"\n"), 10)
        await asyncio.wait_for(process.stderr.readuntil(b"\n"), 10)  # it follows the change
        process.stdin.close()
        _, _ = await asyncio.wait_for(process.communicate(), 10)
        return await asyncio.wait_for(process.wait(), 10)

    assert with_agent(agent, vanish) == 50
    assert list((folder.parent / "run").iterdir()) == []

"""org.avocado.Agent1 of a running avocadod: its shape is the XML's, its answers are the board's, its errors say why."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dbus_fast import BusType, Message, MessageType, Variant
from dbus_fast.aio import MessageBus

from agent.change.journal import Journal
from agent.change.record import ChangeRecord, Phase, StepRecord
from agent.config import Config
from agent.contract.errors import ErrorCode, OperationError
from agent.daemon import load_or_default
from agent.ports.clock import SystemClock
from agent.ports.files import write_durably
from tests.bus.fake_inference import FakeInference
from tests.bus.fake_systemd import FakeSystemd, FakeUnit
from tests.bus.private_bus import environment, private_bus

TREE = Path(__file__).resolve().parents[2]
XML = TREE / "units/dbus-1/interfaces/org.avocado.Agent1.xml"
NAME, PATH = "org.avocado.Agent1", "/org/avocado/Agent1"
MANAGER, CHANGE = f"{NAME}.Manager", f"{NAME}.Change"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changing a board needs root, on a test's bus too")


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with private_bus(tmp_path) as found:
        yield found


class Rig:
    """One avocadod with an empty state, its systemd, and a client."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self.address = address
        self.state, self.run_dir = folder / "state", folder / "run"
        self.state.mkdir()
        (self.state / "board.json").write_text('{"target": "virtual", "arch": "x86_64"}')
        self.run_dir.mkdir()
        self.config = folder / "agent.toml"
        # Never this machine's own overlays.
        self.config.write_text(
            f'state_dir = "{self.state}"\nrun_dir = "{self.run_dir}"\nstatus_interval_s = 0.5\noverlay = "reload"\n'
        )
        self.systemd = FakeSystemd(self.state, folder / "bin")
        for name in ("systemd-sysext.service", "systemd-confext.service"):
            self.systemd.add(FakeUnit(name, active="active"))
        self.bus: MessageBus
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        command = [sys.executable, "-m", "agent.daemon", "--config", str(self.config)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=TREE, env=environment(self.address, PATH=path), stderr=log)

    async def ready(self, refused_with: str) -> None:
        async with asyncio.timeout(60):
            while True:
                if self.process.poll() is not None:
                    raise AssertionError((self.folder / "log").read_text())
                # Answered only when the start is finished, and refused: mostly for want of a runtime.
                reply = await self.ask("Refresh")
                if reply.error_name == refused_with:
                    return
                await asyncio.sleep(0.05)

    async def ask(self, member: str, signature: str = "", body: list[Any] | None = None, **where: str) -> Message:
        message = Message(
            destination=NAME,
            path=where.get("path", PATH),
            interface=where.get("interface", MANAGER),
            member=member,
            signature=signature,
            body=body or [],
        )
        reply = await asyncio.wait_for(self.bus.call(message), 10)
        assert reply is not None
        return reply

    async def error(self, member: str, signature: str = "", body: list[Any] | None = None) -> OperationError:
        reply = await self.ask(member, signature, body)
        assert reply.message_type is MessageType.ERROR, reply.body
        error = OperationError.from_dict(json.loads(reply.body[0]))
        assert reply.error_name == error.dbus_name
        return error

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(15)


@pytest.fixture
def rig(tmp_path: Path, address: str) -> Iterator[Rig]:
    made = Rig(tmp_path, address)
    yield made
    if hasattr(made, "process") and made.process.poll() is None:
        made.process.kill()
        made.process.wait(5)


def serving(rig: Rig, use: Callable[[], Any], *, refused_with: str = "org.avocado.Error.NotFound") -> None:
    async def scenario() -> None:
        await rig.systemd.appear(rig.address)
        rig.bus = await MessageBus(rig.address, bus_type=BusType.SYSTEM).connect()
        try:
            rig.start()
            await rig.ready(refused_with)
            await use()
        finally:
            # The daemon asks systemd while it ends; the loop must answer.
            await asyncio.to_thread(rig.stop)
            rig.bus.disconnect()
            rig.systemd.leave()

    asyncio.run(scenario())


def shape(interface: ET.Element) -> dict[str, Any]:
    """Members with their types, whatever order or argument names introspection gives them."""
    members: dict[str, Any] = {}
    for member in interface:
        if member.tag == "property":
            members[member.attrib["name"]] = ("property", member.attrib["type"], member.attrib["access"])
        elif member.tag in ("method", "signal"):
            default = "in" if member.tag == "method" else "out"
            arguments = [(a.attrib.get("direction", default), a.attrib["type"]) for a in member.findall("arg")]
            members[member.attrib["name"]] = (member.tag, arguments)
    return members


def shapes(xml: str) -> dict[str, Any]:
    return {i.attrib["name"]: shape(i) for i in ET.fromstring(xml).findall("interface")}


def test_introspection_equals_the_interface_xml(rig: Rig) -> None:
    contract = shapes(XML.read_text())
    record(rig, 3)

    async def use() -> None:
        for path, interface in ((PATH, MANAGER), (f"{PATH}/change/3", CHANGE)):
            reply = await rig.ask("Introspect", path=path, interface="org.freedesktop.DBus.Introspectable")
            assert shapes(reply.body[0])[interface] == contract[interface]

    serving(rig, use)


@pytest.mark.parametrize(
    ("hangs", "message"),
    [
        (True, "cannot get an answer from org.avocado.Inference1 on the system bus: nothing in 2 s"),
        (False, "cannot read the pose service's state: it is not JSON"),
    ],
)
def test_a_pose_service_that_does_not_answer_is_a_problem_and_keeps_no_change_back(
    rig: Rig, hangs: bool, message: str
) -> None:
    inference = FakeInference()
    inference.hangs, inference.document = hangs, "no JSON"

    async def use() -> None:
        await inference.appear(rig.address)
        try:
            # Refused for want of a runtime, as on any other day.
            assert (await rig.error("Refresh")).code is ErrorCode.NOT_FOUND
            document = json.loads((await rig.ask("Describe")).body[0])
            assert (document["inference"]["state"], document["inference"]["message"]) == ("silent", message)
            assert document["problems"] == [
                {
                    "code": "inference-silent",
                    "message": message,
                    "remedy": "Start it again: systemctl restart pose.service",
                }
            ]
        finally:
            inference.leave()

    serving(rig, use)


def record(rig: Rig, number: int, **changes: Any) -> ChangeRecord:
    made = ChangeRecord(
        number=number,
        kind="refresh",
        boot_id=SystemClock().boot_id(),
        requested_by="root",
        from_runtime=None,
        to_runtime=None,
        steps=(StepRecord("reload", {"images": [], "leaving": []}, Phase.PENDING),),
        started_at="2026-11-30T22:00:00Z",
        **changes,
    )
    Journal(rig.state / "changes", write_durably).save(made)
    return made


def test_describe_is_the_status_document_and_the_file_says_the_same(rig: Rig) -> None:
    async def use() -> None:
        document = json.loads((await rig.ask("Describe")).body[0])
        assert (document["target"], document["arch"], document["runtime"]) == ("virtual", "x86_64", None)
        assert document["agent"]["pid"] == rig.process.pid
        file = json.loads((rig.run_dir / "status.json").read_text())
        assert file["schema"] == document["schema"] == 1
        assert (rig.run_dir / "status.json").stat().st_mode & 0o777 == 0o640

    serving(rig, use)


def test_avocadoctl_reads_the_status_without_the_bus_and_says_when_the_agent_is_gone(rig: Rig) -> None:
    def status(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "agent.cli", "status", *words]
        env = environment("unix:path=/nowhere", AVOCADO_RUN_DIR=str(rig.run_dir))
        return subprocess.run(command, cwd=TREE, env=env, capture_output=True, text=True, timeout=20)

    async def use() -> None:
        finished = await asyncio.to_thread(status, "-o", "json")
        assert finished.returncode == 0, finished.stderr
        assert json.loads(finished.stdout)["problems"] == []

    serving(rig, use)
    gone = status()
    assert "the agent is not running" in gone.stdout
    assert "try: See why: systemctl status avocadod" in gone.stdout


def test_an_interrupted_change_is_reverted_at_start_and_the_bus_shows_it(rig: Rig) -> None:
    record(rig, 1)

    async def use() -> None:
        reply = await rig.ask("Describe", path=f"{PATH}/change/1", interface=CHANGE)
        document = json.loads(reply.body[0])
        assert document["outcome"] == "reverted"
        assert document["reason"]["message"].startswith("cannot finish change 1: the agent was restarted")
        listed = json.loads((await rig.ask("ListChanges", "u", [1])).body[0])
        assert [change["number"] for change in listed] == [1]

    serving(rig, use)


def test_an_unreadable_journal_leaves_the_status_readable_and_every_change_refused_by_its_reason(rig: Rig) -> None:
    (rig.state / "changes").mkdir()
    (rig.state / "changes/1.json").write_text('{"schema": 99}')

    async def use() -> None:
        error = await rig.error("Refresh")
        assert error.code is ErrorCode.NEWER_SCHEMA
        assert error.message == "cannot read the change record: schema 99, this agent reads 1 of change 1"
        document = json.loads((await rig.ask("Describe")).body[0])
        assert [problem["code"] for problem in document["problems"]] == ["newer-schema"]

    serving(rig, use, refused_with="org.avocado.Error.NewerSchema")


def test_a_tool_of_systemd_that_fails_is_a_problem_and_not_the_end_of_the_agent(rig: Rig) -> None:
    (rig.folder / "bin/systemd-confext").write_text("#!/bin/sh\necho 'no such thing' >&2; exit 1\n")

    async def use() -> None:
        document = json.loads((await rig.ask("Describe")).body[0])
        assert "cannot run systemd-confext: no such thing" in [problem["message"] for problem in document["problems"]]

    serving(rig, use, refused_with="org.avocado.Error.SwitchFailed")


REFUSALS: list[tuple[str, str, list[Any], ErrorCode, str]] = [
    ("Refresh", "", [], ErrorCode.NOT_FOUND, "cannot refresh the extensions: no runtime is active"),
    ("Rollback", "sa{sv}", ["", {}], ErrorCode.NOT_FOUND, "cannot roll back: this board has no previous runtime"),
    ("Activate", "sa{sv}", ["x", {}], ErrorCode.NOT_FOUND, "cannot activate runtime x: it is not on this board"),
    ("Remove", "s", ["x"], ErrorCode.NOT_FOUND, "cannot remove runtime x: it is not on this board"),
    (
        "Activate",
        "sa{sv}",
        ["x", {"force": Variant("b", True)}],
        ErrorCode.USAGE,
        "cannot use option force: this agent does not know it",
    ),
    ("Confirm", "o", ["/x"], ErrorCode.USAGE, "cannot confirm /x: it is no change of this agent"),
    (
        "Confirm",
        "o",
        [f"{PATH}/change/7"],
        ErrorCode.NOT_FOUND,
        "cannot confirm change 7: it does not wait for a confirmation",
    ),
    ("Disable", "sa{sv}", ["x", {}], ErrorCode.NOT_FOUND, "cannot disable extension x: no runtime is active"),
    ("Enable", "sa{sv}", ["x", {}], ErrorCode.NOT_FOUND, "cannot enable extension x: no runtime is active"),
]


def test_a_request_that_is_refused_says_why_and_is_no_change(rig: Rig) -> None:
    async def use() -> None:
        for member, signature, body, code, message in REFUSALS:
            error = await rig.error(member, signature, body)
            assert (error.code, error.message) == (code, message)
        assert json.loads((await rig.ask("ListChanges", "u", [0])).body[0]) == []

    serving(rig, use)


def test_a_caller_who_is_neither_root_nor_in_the_group_is_refused_every_call_and_property(rig: Rig) -> None:
    calls = [
        (member, "".join(type_ for direction, type_ in details[1] if direction == "in"))
        for member, details in shapes(XML.read_text())[MANAGER].items()
        if details[0] == "method"
    ]
    samples = {"s": "x", "a{sv}": {}, "o": "/x", "u": 0}
    rig.folder.chmod(0o755)
    for parent in rig.folder.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o055)

    async def use() -> None:
        listing = [
            [m, s, [samples[t] for t in s.replace("a{sv}", "D").replace("D", "")]] for m, s in calls if "{" not in s
        ]
        listing += [[m, s, ["x", {}]] for m, s in calls if "{" in s]
        program = _AS_NOBODY.format(calls=json.dumps(listing), address=rig.address, name=NAME, path=PATH)
        command = [sys.executable, "-c", program]
        finished = await asyncio.to_thread(
            subprocess.run, command, cwd=TREE, capture_output=True, text=True, timeout=20
        )
        assert finished.returncode == 0, finished.stderr
        answers = json.loads(finished.stdout)
        assert len(answers) == len(calls) + 3
        assert set(answers.values()) == {"org.avocado.Error.NotPermitted"}

    serving(rig, use)


_AS_NOBODY = """
import asyncio, json, os
from dbus_fast import BusType, Message
from dbus_fast.aio import MessageBus
os.setgroups([]); os.setgid(65534); os.setuid(65534)
async def main():
    bus = await MessageBus("{address}", bus_type=BusType.SYSTEM).connect()
    answers = {{}}
    asked = [(m, s, b, "{name}.Manager") for m, s, b in json.loads('''{calls}''')]
    asked += [("Get", "ss", ["{name}.Manager", p], "org.freedesktop.DBus.Properties")
              for p in ("Version", "ActiveRuntime", "RunningChange")]
    for member, signature, body, interface in asked:
        reply = await bus.call(Message(destination="{name}", path="{path}", interface=interface, member=member,
                                       signature=signature, body=body))
        answers[member + str(body)] = reply.error_name
    print(json.dumps(answers))
asyncio.run(main())
"""


def test_a_change_that_is_not_there_cannot_be_cancelled_or_confirmed(rig: Rig) -> None:
    async def use() -> None:
        said = {}
        for verb in ("cancel", "confirm"):
            line = [sys.executable, "-m", "agent.cli", verb, "7"]
            run = functools.partial(subprocess.run, line, cwd=TREE, env=environment(rig.address), timeout=20)
            done = await asyncio.to_thread(run, capture_output=True, text=True, check=False)
            said[verb] = (done.returncode, done.stderr)
        assert said == {
            "cancel": (
                6,
                "avocadoctl: cannot find that change: it neither runs nor is the one that ran last\n"
                "  try: See which there are: avocadoctl history\n",
            ),
            "confirm": (
                6,
                "avocadoctl: cannot confirm change 7: it does not wait for a confirmation\n"
                "  try: See how it stands: avocadoctl history show 7\n",
            ),
        }

    serving(rig, use)


def test_a_wrong_configuration_is_a_problem_and_not_the_end_of_the_agent(rig: Rig) -> None:
    # The defaults name the board's own folders; this machine has none of them, so nothing but the status is asked for.
    rig.config.write_text("stauts_interval_s = 1\n")
    config, problems = load_or_default(rig.config)
    assert config == Config()
    assert [problem.code for problem in problems] == ["bad-config"]
    assert str(rig.config) in problems[0].message


def test_an_unreadable_journal_does_not_keep_the_boot_half_from_running(rig: Rig) -> None:
    (rig.state / "changes").mkdir()
    record = rig.state / "changes/1.json"
    record.write_text('{"schema": 99}')

    async def use() -> None:
        assert (rig.run_dir / "boot-half.json").exists()
        # Whoever put it right need not restart the agent.
        record.unlink()
        assert (await rig.error("Refresh")).code is ErrorCode.NOT_FOUND
        assert json.loads((await rig.ask("Describe")).body[0])["problems"] == []

    serving(rig, use, refused_with="org.avocado.Error.NewerSchema")

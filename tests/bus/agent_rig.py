"""A running avocadod on a private bus, with an empty state, a systemd that remembers, and a client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dbus_fast import BusType, Message, MessageType
from dbus_fast.aio import MessageBus

from agent.change.journal import Journal
from agent.change.record import ChangeRecord, Phase, StepRecord
from agent.contract.errors import OperationError
from agent.ports.clock import SystemClock
from agent.ports.files import write_durably
from tests.bus.fake_systemd import FakeSystemd, FakeUnit
from tests.bus.private_bus import environment, private_bus

TREE = Path(__file__).resolve().parents[2]
NAME, PATH = "org.avocado.Agent1", "/org/avocado/Agent1"
MANAGER, CHANGE = f"{NAME}.Manager", f"{NAME}.Change"


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
                reply = await self.ask("Refresh", "a{sv}", [{}])
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

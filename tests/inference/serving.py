"""A real `avocado-infer serve` for a test: its own port, run folder, NPU node and bus, and a socket like systemd's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
MODEL = Path(os.environ.get("AVOCADO_TEST_MODEL", ROOT / "build/models/movenet-lightning"))
PICTURES = ROOT / "build/assets/replay"
DELEGATE = ROOT / "build/simnpu/libsimnpu.so"
WATCHDOG_S = 2.0

PROFILE = """
name = "virtual"
kind = "npu"
nodes = ["{node}"]
[delegate]
path = "{delegate}"
[delegate.options]
node = "{node}"
ops = "ADD"
max_nodes = "1"
control = "{control}"
[deadlines]
soft_ms_floor = 60.0
soft_ms_ceiling = 200.0
[recovery]
backoff_s = 0.1
backoff_max_s = 0.2
give_up_after = 1000
"""


def need_parts() -> None:
    """Skip where the model or the simulated NPU was not built."""
    for path, how in ((MODEL / "model.json", "make model"), (DELEGATE, "make setup")):
        if not path.exists():
            pytest.skip(f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path} is missing: run `{how}`")


def write_pictures(folder: Path) -> None:
    """The replayed video where it was fetched, otherwise a few pictures with nobody in them."""
    folder.mkdir(exist_ok=True)
    for index in range(10):
        source = PICTURES / f"{60 + index:04}.jpg"
        target = folder / f"{index:04}.jpg"
        if source.exists():
            target.write_bytes(source.read_bytes())
        else:
            Image.radial_gradient("L").resize((640, 360)).rotate(9 * index).convert("RGB").save(target)


@dataclass
class Service:
    """One running service, and what it told its manager."""

    process: subprocess.Popen[bytes]
    manager: socket.socket
    page: str
    control: Path
    bus_address: str
    log: Path

    def told(self, wanted: Callable[[str], bool], timeout_s: float) -> str:
        """The next notification that is wanted."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            self.manager.settimeout(left)
            try:
                message = self.manager.recv(4096).decode()
            except TimeoutError:
                break
            if wanted(message):
                return message
        raise AssertionError(f"no such notification within {timeout_s} s; the log says:\n{self.log.read_text()}")

    def wait_ready(self) -> None:
        self.told(lambda message: "READY=1" in message, 45)

    def forget_notifications(self) -> None:
        self.manager.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while self.manager.recv(4096):
                pass

    def stop(self) -> tuple[int, float]:
        """SIGTERM; the exit status and how long it took."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(10), time.monotonic() - began

    def descendants(self) -> set[int]:
        """Every process below this one, now."""
        children: dict[int, list[int]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    children.setdefault(parent, []).append(int(entry.name))
        found: set[int] = set()
        waiting = [self.process.pid]
        while waiting:
            below = children.get(waiting.pop(), [])
            found.update(below)
            waiting += below
        return found

    async def status(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(self.page + "api/status") as answer:
            document: dict[str, Any] = await answer.json()
            return document

    async def wait_status(self, wanted: Callable[[dict[str, Any]], bool], timeout_s: float) -> dict[str, Any]:
        document: dict[str, Any] = {}
        try:
            async with asyncio.timeout(timeout_s):
                while not wanted(document := await self.status()):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"{document}\n{self.log.read_text()}") from None
        return document

    @contextlib.asynccontextmanager
    async def poses(self) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """The events of /api/poses, from now on."""
        async with aiohttp.ClientSession() as session, session.get(self.page + "api/poses") as answer:

            async def events() -> AsyncIterator[dict[str, Any]]:
                async for line in answer.content:
                    assert b"skipped" not in line
                    if line.startswith(b"data: "):
                        yield json.loads(line[6:])

            yield events()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(folder: Path, bus_address: str, *, pictures: bool = True, config: str = "") -> Iterator[Service]:
    """Start the service; whatever is left of it is killed at the end."""
    need_parts()
    node = folder / "simnpu0"
    node.touch()
    control = folder / "run" / "simnpu-control"
    replay = folder / "replay"
    replay.mkdir(exist_ok=True)
    if pictures:
        write_pictures(replay)
    port = free_port()
    profile = folder / "accelerator.toml"
    profile.write_text(PROFILE.format(node=node, delegate=DELEGATE, control=control))
    settings = folder / "pose.toml"
    settings.write_text(
        config
        or f'[camera]\nsource = "replay:{replay}"\nfps = 20\n[web]\nlisten = "127.0.0.1:{port}"\n'
        f'[model]\nfolder = "{MODEL}"\n[accelerator]\nprofile = "{profile}"\n'
    )
    log = folder / "log"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, log.open("wb") as output:
        manager.bind(str(folder / "notify"))
        environment = {
            **os.environ,
            "DBUS_SYSTEM_BUS_ADDRESS": bus_address,
            "NOTIFY_SOCKET": str(folder / "notify"),
            "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6)),
        }
        environment.pop("WATCHDOG_PID", None)
        command = ["serve", "--config", str(settings), "--run-dir", str(folder / "run")]
        process = subprocess.Popen(
            [sys.executable, "-m", "inference.cli", *command], cwd=ROOT, env=environment, stdout=output, stderr=output
        )
        try:
            yield Service(process, manager, f"http://127.0.0.1:{port}/", control, bus_address, log)
        finally:
            process.kill()
            process.wait(10)

"""Runs on the board: an adapter of the Overlay port, driven line by line by a test or a benchmark on the host.

Started from a folder that holds a copy of the agent with its packages, since the agent's own extension is one of those
that come and go. Each line on stdin is a JSON list, a method and its arguments; each line of the answer is JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from dbus_fast import BusType
from dbus_fast.aio import MessageBus

from agent.contract.errors import ErrorCode, OperationError
from agent.observe import identify
from agent.ports import child
from agent.ports.overlay import choose_overlay
from agent.ports.process import run_checked
from agent.ports.protocols import Kind
from agent.ports.systemd import SystemdUnits

STATE = Path("/var/lib/avocado")


def answer(overlay: Any, method: str, arguments: list[Any]) -> Any:
    """One call of the port."""
    if method == "show":
        overlay.show(STATE / "runtimes" / arguments[0] if arguments[0] else None, 30)
        return None
    if method == "check":
        overlay.check(STATE / "runtimes" / arguments[0], 30)
        return None
    if method == "settle":
        overlay.settle(30)
        return None
    if method == "refresh":  # systemd's way to the same end: the link, then its own command
        (STATE / "next").symlink_to(f"runtimes/{arguments[0]}")
        (STATE / "next").rename(STATE / "active")
        run_checked(["systemd-sysext", "refresh"], 30, failure=ErrorCode.SWITCH_FAILED)
        return None
    if method == "cut":  # the next switch is killed at its n-th umount2
        inject = ["-qq", "-o", "/dev/null", "-e", f"inject=umount2:signal=KILL:when={arguments[0]}"]
        overlay._command = ["strace", *inject, *overlay._command]
        return None
    merged = overlay.merged()
    images = {kind.value: dict(merged.images[kind]) for kind in Kind if kind in merged.images}
    return {"names": {kind.value: list(names) for kind, names in merged.names.items()}, "images": images}


async def main(wanted: str) -> None:
    """Say which adapter it is, then answer until stdin ends."""
    bus = await MessageBus(bus_type=BusType.SYSTEM).connect()
    units = await SystemdUnits.connect(bus)
    if wanted == "old-kernel":  # what a kernel before 6.5 answers
        command = child.command
        inject = ["-qq", "-o", "/dev/null", "-e", "inject=move_mount:error=EINVAL"]
        child.command = lambda *modules: ["strace", *inject, *command(*modules)]
        wanted = "auto"
    identity = identify({}, "0")
    made, switching = await asyncio.to_thread(
        choose_overlay, units, STATE, identity.os_release, identity.arch, wanted=wanted
    )
    print(json.dumps({"way": switching.way, "reason": switching.reason, "pid": os.getpid()}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        method, *arguments = json.loads(line)
        began = time.monotonic()
        try:
            said: dict[str, Any] = {"value": await asyncio.to_thread(answer, made, method, arguments)}
        except OperationError as error:
            said = {"error": error.as_dict()}
        print(json.dumps(said | {"ms": round((time.monotonic() - began) * 1000, 3)}), flush=True)
    bus.disconnect()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))

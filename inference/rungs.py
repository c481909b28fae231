"""avocado-infer reset: carries out one rung of the reset ladder, as root, because the pose service may not.

`pose-reset.service` runs this once for each request that the supervisor leaves (`inference/reset.py`). The request says
which rung and nothing else: what is reset is the board's own profile's to say, and a rung that it does not list is
refused, so that whoever takes over the service gains no more than the profile grants. A request is taken away before
it is acted on. Reboots are counted in a durable file; one that bought an hour of service is forgotten.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

from inference.accelerator import Accelerator, load_accelerator
from inference.config import read_config
from inference.errors import InferenceError
from inference.policy import Rung
from inference.reset import ANSWER, REQUEST

REBOOTS = Path("/var/lib/avocado-pose-reset/reboots.json")
_LIMIT_BYTES = 4096
_GONE_S = 5.0
_BACK_S = 10.0
_TOOL_S = 20.0
_FORGET_AFTER_S = 3600.0


@dataclass(frozen=True, slots=True)
class Ground:
    """Where the rungs act; tests give another root."""

    sysfs: Path = Path("/sys")
    reboots: Path = REBOOTS
    uptime_s: float = 0.0


def register(subparsers: Any) -> None:
    """Add the verb's parser."""
    parser = subparsers.add_parser("reset", help="carry out a requested rung of the reset ladder (pose-reset.service)")
    parser.add_argument("--request", type=Path, default=Path("/run/avocado-pose") / REQUEST)
    parser.add_argument("--answer", type=Path, default=ANSWER)
    parser.add_argument("--profile", default=None, help="accelerator profile (default: the one pose.toml names)")


def run(arguments: argparse.Namespace) -> int:
    """0 when the rung was carried out; 1 when it was refused, which the answer explains."""
    request = take_request(arguments.request)
    ground = Ground(uptime_s=_uptime_s())

    def tell(done: bool, message: str) -> None:
        write_answer(arguments.answer, {"number": request["number"], "done": done, "message": message})
        print(message, file=sys.stderr)

    try:
        rung = request["rung"]
        profile = arguments.profile or read_config(None).accelerator.profile
        message = carry_out(rung, load_accelerator(profile), ground)
    except InferenceError as error:
        tell(False, error.message)
        return 1
    tell(True, message)
    if rung is Rung.REBOOT:
        _tool("systemctl", "reboot")
    return 0


def _uptime_s() -> float:
    """How long the first process runs: in a container the kernel's own clock began long before the boot."""
    started_ticks = int(Path("/proc/1/stat").read_text().rpartition(") ")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def take_request(path: Path) -> Mapping[str, Any]:
    """Read the request and take it away; InferenceError when it is none. Its folder belongs to the pose service."""
    try:
        # Neither a link to somewhere else nor a pipe that never ends.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise InferenceError(f"cannot read request {path}: {error.strerror}") from error
    try:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        raw = os.read(descriptor, _LIMIT_BYTES) if regular else b""
    finally:
        os.close(descriptor)
        path.unlink()
    try:
        request = json.loads(raw)
        return {"number": int(request["number"]), "rung": Rung(request["rung"])}
    except (ValueError, KeyError, TypeError) as error:
        raise InferenceError(f"cannot use request {path}: it is not a number and a rung") from error


def write_answer(path: Path, answer: Mapping[str, Any]) -> None:
    """Put the answer in place whole."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(answer))
    fresh.replace(path)


def carry_out(rung: Rung, accelerator: Accelerator, ground: Ground) -> str:
    """Do it; what was done, in words. For a reboot: count it, so that the caller may reboot."""
    if rung not in accelerator.reset.ladder or accelerator.reset.limit(rung, 1) == 0:
        raise InferenceError(f"cannot {rung}: profile {accelerator.name} does not grant it")
    match rung:
        case Rung.NEW_WORKER:
            raise InferenceError("cannot new_worker: that is the service's own to do")
        case Rung.REBIND:
            return _rebind(accelerator, ground.sysfs)
        case Rung.RELOAD_MODULE:
            return _reload(accelerator)
        case Rung.REBOOT:
            return _count_reboot(accelerator.reset.limit(rung, 1), ground)
        case _:
            assert_never(rung)


def _rebind(accelerator: Accelerator, sysfs: Path) -> str:
    device = _device(accelerator, sysfs)
    link = device / "driver"
    if link.exists():
        driver = link.resolve()
        _write(driver / "unbind", device.name)
        _wait(lambda: not link.exists(), _GONE_S, f"cannot rebind {device.name}: its driver does not let it go")
        _write(driver / "bind", device.name)
        known = driver.name
    else:
        # A rebind that was cut short: the bus finds the driver again.
        _write((device / "subsystem").resolve() / "drivers_probe", device.name)
        known = "its driver"
    _wait(link.exists, _BACK_S, f"cannot rebind {device.name}: no driver took it again")
    _await_nodes(accelerator)
    return f"{device.name} was taken from {known} and given back"


def _device(accelerator: Accelerator, sysfs: Path) -> Path:
    if accelerator.reset.device:
        named = sysfs / accelerator.reset.device.removeprefix("/sys/")
    else:
        node = next(iter(accelerator.nodes), None)
        if node is None or not Path(node).exists():
            raise InferenceError(f"cannot rebind: {node or 'a device node'} does not exist", "set reset.device")
        number = Path(node).stat().st_rdev
        named = sysfs / "dev" / "char" / f"{os.major(number)}:{os.minor(number)}" / "device"
    if not named.exists():
        raise InferenceError(f"cannot rebind: {named} does not exist", "set reset.device in the accelerator profile")
    return named.resolve()


def _reload(accelerator: Accelerator) -> str:
    if not accelerator.modules:
        raise InferenceError(f"cannot reload_module: profile {accelerator.name} names no modules")
    for module in accelerator.modules:
        _tool("modprobe", "-r", module)
    for module in reversed(accelerator.modules):
        _tool("modprobe", module)
    _await_nodes(accelerator)
    return f"{', '.join(accelerator.modules)} unloaded and loaded"


def _count_reboot(limit: int, ground: Ground) -> str:
    count = 0
    if ground.reboots.exists() and ground.uptime_s < _FORGET_AFTER_S:
        try:
            count = int(json.loads(ground.reboots.read_bytes())["count"])
        except (ValueError, KeyError, TypeError):
            # A damaged count must not allow one reboot more.
            count = limit
    if count >= limit:
        raise InferenceError(f"cannot reboot: {count} of {limit} reboots were used and the NPU failed again")
    _write_durably(ground.reboots, json.dumps({"count": count + 1}))
    return f"rebooting, {count + 1} of {limit}"


def _await_nodes(accelerator: Accelerator) -> None:
    for node in accelerator.nodes:
        _wait(Path(node).exists, _BACK_S, f"cannot bring {node} back: it did not appear again")


def _wait(condition: Callable[[], bool], patience_s: float, message: str) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() >= deadline:
            raise InferenceError(message)
        time.sleep(0.02)


def _write(path: Path, text: str) -> None:
    try:
        with path.open("w") as file:
            file.write(text)
    except OSError as error:
        raise InferenceError(f"cannot write {path}: {error.strerror}") from error


def _write_durably(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".new")
    with fresh.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _tool(*command: str) -> None:
    try:
        subprocess.run(command, check=True, timeout=_TOOL_S, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.split())[:300] or f"status {error.returncode}"
        raise InferenceError(f"cannot {' '.join(command)}: {said}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InferenceError(f"cannot {' '.join(command)}: {error}") from error

"""Hours in minutes: full rate, a fault every few seconds, another model every period; does anything grow?

Each period runs one model in one supervisor, as a deploy does, and its median sample is one point. Over the points of
all periods but the first quarter, in which caches fill, a straight line is fitted to memory, descriptors, threads,
processes and /dev/shm of this process and all below it; its slope is told with the 95 % interval. Grown means that the
interval lies above zero. Every fault must be recovered and every frame answered. Writes build/bench/soak.json.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inference.errors import InferenceError
from inference.link import SupervisorLink, SupervisorSettings
from inference.model import load_golden_frame, load_model
from inference.policy import Backend

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "build/simnpu/libsimnpu.so"
MODELS = [ROOT / "build/models/movenet-lightning", ROOT / "build/models/movenet-lightning-minmax"]
FAULTS = ("hang", "crash", "error", "spin", "wrong", "abort", "slow:300")
PERIODS = 20
_FAULT_EVERY_S = 3.0
_RECOVERY_S = 60.0
# Student's t, two-sided 95 %, by degrees of freedom; beyond the table the normal one is near enough.
_T95 = {1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 8: 2.31, 10: 2.23, 15: 2.13, 18: 2.10, 30: 2.04}


@dataclass(slots=True)
class Tally:
    """What happened."""

    frames: int = 0
    fallbacks: int = 0
    unanswered: int = 0
    faults: int = 0
    unrecovered: int = 0
    swaps: int = 0
    longest_recovery_s: float = 0.0
    points: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


class Soak:
    """One run."""

    def __init__(self, folder: Path, models: Sequence[Path], seconds: float) -> None:
        self._folder = folder
        self._models = itertools.cycle(models)
        self._period_s = seconds / PERIODS
        self._faults = itertools.cycle(FAULTS)
        self._began = time.monotonic()
        self.tally = Tally()

    async def run(self) -> None:
        """Every period, one after the other."""
        for _ in range(PERIODS):
            await self._period(next(self._models))
            self.tally.swaps += 1

    async def _period(self, model: Path) -> None:
        until = time.monotonic() + self._period_s
        (self._folder / "node").touch()
        self._inject("ok")
        options = {"node": str(self._folder / "node"), "control": str(self._folder / "control")}
        overrides = {
            "nodes": [],
            "delegate": {"path": str(LIBRARY), "options": options},
            "recovery": {"backoff_s": 0.1, "backoff_max_s": 0.2, "give_up_after": 1 << 30},
            # Priority is not what is measured, and minutes of it would take the machine from everybody else.
            "resources": {"cpu": {"fifo_priority": 0}, "supervisor": {"fifo_priority": 0}},
        }
        link = await SupervisorLink.start(SupervisorSettings(model, "virtual", self._folder, overrides))
        stopping = asyncio.Event()
        frames = asyncio.create_task(self._frames(link, load_golden_frame(load_model(model)), stopping))
        samples: list[dict[str, float]] = []
        try:
            await self._served(link, Backend.NPU)
            while time.monotonic() < until:
                await self._fault(link)
                samples.append(sample())
        finally:
            stopping.set()
            await frames
            self.tally.fallbacks += link.state.fallbacks
            await link.close()
        at_min = (time.monotonic() - self._began) / 60
        for key in samples[0] if samples else ():
            median = statistics.median(taken[key] for taken in samples)
            self.tally.points.setdefault(key, []).append((at_min, median))

    async def _fault(self, link: SupervisorLink) -> None:
        """One fault, its recovery, and a while of good service."""
        self._inject(next(self._faults))
        self.tally.faults += 1
        fell = time.monotonic()
        while link.state.backend is Backend.NPU and time.monotonic() < fell + _RECOVERY_S:
            await link.next_state()
        self._inject("ok")
        healed = time.monotonic()
        await self._served(link, Backend.NPU)
        self.tally.longest_recovery_s = max(self.tally.longest_recovery_s, time.monotonic() - healed)
        await asyncio.sleep(max(0.0, _FAULT_EVERY_S - (time.monotonic() - fell)))

    async def _served(self, link: SupervisorLink, backend: Backend | None) -> None:
        try:
            await link.wait_serving(_RECOVERY_S, backend=backend)
        except InferenceError:
            self.tally.unrecovered += 1

    async def _frames(self, link: SupervisorLink, frame: Any, stopping: asyncio.Event) -> None:
        # As the service does: frames count from when something serves.
        await self._served(link, None)
        while not stopping.is_set():
            try:
                await link.infer(frame)
                self.tally.frames += 1
            except InferenceError:
                self.tally.unanswered += 1

    def _inject(self, mode: str) -> None:
        fresh = self._folder / "control.new"
        fresh.write_text(mode)
        fresh.rename(self._folder / "control")


def sample() -> dict[str, float]:
    """What this process and everything below it holds now."""
    pids = list(_family(os.getpid()))
    memory = fds = threads = 0
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            fds += len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except OSError:
            # It has ended since it was listed.
            continue
        values = dict(line.split(":", 1) for line in status.splitlines())
        memory += int(values.get("VmRSS", "0 kB").split()[0])
        threads += int(values["Threads"])
    return {
        "memory_kib": memory,
        "own_memory_kib": int(Path("/proc/self/statm").read_text().split()[1]) * 4,
        "descriptors": fds,
        "threads": threads,
        "processes": len(pids),
        "dev_shm": len(list(Path("/dev/shm").iterdir())),  # noqa: S108 - counted, not used
    }


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _family(int(child))


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Growth a minute by least squares, and the half width of its 95 % interval."""
    count = len(points)
    if count < 3:
        return 0.0, float("inf")
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    growth = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - growth * (x - mean_x)) ** 2 for x, y in points)
    t95 = _T95[max(freedom for freedom in _T95 if freedom <= count - 2)]
    return growth, t95 * (rest / (count - 2) / spread) ** 0.5


def main() -> int:
    """0 when nothing grows, every fault was recovered and every frame answered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench/soak.json")
    arguments = parser.parse_args()
    models = [model for model in MODELS if (model / "model.json").exists()]
    with tempfile.TemporaryDirectory(prefix="avocado-soak-") as folder:
        soak = Soak(Path(folder), models, arguments.minutes * 60)
        asyncio.run(soak.run())
    tally = soak.tally
    slopes = {key: slope(points[len(points) // 4 :]) for key, points in tally.points.items()}
    found = {
        **{key: getattr(tally, key) for key in ("frames", "fallbacks", "unanswered", "faults", "unrecovered", "swaps")},
        "longest_recovery_s": round(tally.longest_recovery_s, 2),
        "minutes": arguments.minutes,
        "load_average": os.getloadavg()[0],
        "slopes_per_minute": {key: [round(part, 4) for part in parts] for key, parts in slopes.items()},
        "points": {key: [[round(x, 2), y] for x, y in points] for key, points in tally.points.items()},
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    for key, value in found.items():
        if not isinstance(value, dict):
            print(f"{key:22}{value!s:>14}")
    print(f"\n{'a minute':22}{'slope':>12}{'+-':>12}")
    for key, (growth, half) in slopes.items():
        print(f"{key:22}{growth:>12.3f}{half:>12.3f}{'   grows' if growth - half > 0 else ''}")
    grown = any(growth - half > 0 for growth, half in slopes.values())
    return 1 if grown or tally.unanswered or tally.unrecovered or tally.frames == 0 else 0


if __name__ == "__main__":
    sys.exit(main())

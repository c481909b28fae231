"""Switching the extensions on the virtual board: the gapless adapter beside `systemd-sysext refresh`, in one run.

First the files: both ways switch between two sets in turns, while two readers look at files that are in both. Counted
are looks that found a file missing, and mounts and loop devices before and after. Then the poses: how long a viewer
gets none while a change brings another model, beside a bare stop, refresh and start of the same unit, in turns too.
Writes build/bench/switch.json and prints one table of each. Status 0 when nothing was missing and the limits held.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.device import nspawn
from tests.device.board import Board
from tests.device.overlays import DRIVER, Built, Driver, Image, conf, gap, install
from tests.device.poses import PoseReader
from tests.device.reference import FIRST_MODEL, NEW_MODEL, PAGE_PORT, Reference, wait_until_serving

ROOT = Path(__file__).parents[1]
BLOCKS = 8  # of switches, the two ways in turns
BALLAST_BYTES = 3_000_000
READERS = 2
LIMIT_FACTOR = 1.5
QUIET_S = 3.0
WAYS = ("gapless", "refresh")


@dataclass(slots=True)
class Files:
    """What readers saw while one way switched."""

    switches: int = 0
    looks: int = 0
    missing: int = 0
    failed: int = 0
    wrong_content: int = 0
    flips_seen: int = 0
    longest_gap_ms: float = 0.0
    base_missing: int = 0
    ms: list[float] = field(default_factory=list)

    def take(self, report: str) -> None:
        """Add what one reader printed."""
        for line in report.splitlines():
            name, looked, missing, failed, longest_us = line.split()
            if name == "flips":
                self.flips_seen += int(looked)
                self.wrong_content += int(missing)
            elif name == "base":
                self.base_missing += int(missing)
            else:
                self.looks += int(looked)
                self.missing += int(missing)
                self.failed += int(failed)
                self.longest_gap_ms = max(self.longest_gap_ms, float(longest_us) / 1000)

    def figures(self) -> dict[str, Any]:
        """The counts, and the times in order of size."""
        ordered = sorted(self.ms)
        counts = {name: value for name, value in asdict(self).items() if name != "ms"}
        parts = {"min": 0.0, "p50": 0.5, "p95": 0.95, "max": 1.0}
        times = {f"ms_{name}": round(ordered[round(part * (len(ordered) - 1))], 1) for name, part in parts.items()}
        return counts | times


def main() -> int:
    """0 when no file was missing, nothing was left, and the poses came back in time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--switches", type=int, default=200, help="of each way (default 200)")
    parser.add_argument("--rounds", type=int, default=15, help="of model changes, 0 leaves them out (default 15)")
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench/switch.json")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"load_before": os.getloadavg()[0], "files": files(arguments.switches)}
    if arguments.rounds:
        figures["poses"] = poses(arguments.rounds)
    figures["load_after"] = os.getloadavg()[0]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(figures, indent=1) + "\n")
    show(figures)
    return 0 if held(figures) else 1


# -- files


def files(switches: int) -> dict[str, Any]:
    """Both ways in turns on a board of their own."""
    runtimes = {version: [with_ballast(gap(version)), conf("1")] for version in ("a", "b")}
    built: dict[str, Built] = {}
    with Board.create("bench-switch") as board:
        board.provision(lambda root: built.update(prepared(root, runtimes)))
        board.boot()
        found = {way: Files() for way in WAYS}
        with Driver(board, "auto") as driver:
            if driver.way != "gapless":
                raise SystemExit(f"this kernel cannot switch without a gap: {driver.reason}")
            # What was started at boot runs from the overlay of the boot, and keeps it for good; that is not a leak.
            for version in "ba":
                driver.ask("show", built[version].runtime)
            before = left_behind(board, built)
            for block in range(2 * BLOCKS):
                way = WAYS[block % 2]
                one_block(board, driver, way, built, found[way], switches // BLOCKS)
            after = left_behind(board, built)
        said = json.loads(board.exec(["systemd-sysext", "status", "--json=short"]).stdout)
        board.exec(["systemd-sysext", "refresh"])
        board.exec(["systemd-sysext", "unmerge"])
        gone = not board.exec(["cat", "/usr/share/gap/both"], check=False).stdout
    agrees = gone and all(row["extensions"] == ["99-gap"] for row in said)
    ways = {way: counted.figures() for way, counted in found.items()}
    return {"ways": ways, "before": before, "after": after, "systemd_agrees": agrees}


def with_ballast(image: Image) -> Image:
    """As large as a small extension really is."""
    return Image(image.name, image.kind, {**image.files, "usr/share/gap/ballast": os.urandom(BALLAST_BYTES // 2).hex()})


def prepared(root: Path, runtimes: dict[str, list[Image]]) -> dict[str, Built]:
    """The sets, the driver and the reader on a board's disk."""
    built = install(root, runtimes, "a")
    reader = root / DRIVER.lstrip("/") / "reader"
    source = Path(__file__).with_name("switch_reader.c")
    subprocess.run(["cc", "-O2", "-Wall", "-static", "-o", str(reader), str(source)], check=True)
    return built


def one_block(board: Board, driver: Driver, way: str, built: dict[str, Built], counted: Files, switches: int) -> None:
    """Switch there and back; it ends on the set it began with."""
    with readers(board, counted):
        for index in range(switches):
            runtime = built["ab"[(index + 1) % 2]].runtime
            said = driver.ask("show" if way == "gapless" else "refresh", runtime)
            if "error" in said:
                raise SystemExit(f"{way}: {said['error']['message']}")
            counted.ms.append(said["ms"])
            counted.switches += 1


@contextmanager
def readers(board: Board, counted: Files) -> Iterator[None]:
    """They run meanwhile, and what they saw is added at the end."""
    init = nspawn.init_pid(board.slot.groups)
    if init is None:
        raise SystemExit("the board is gone")
    line = [*nspawn.inside(init), f"{DRIVER}/reader"]
    running = [subprocess.Popen(line, stdout=subprocess.PIPE, text=True) for _ in range(READERS)]
    try:
        yield
        # nsenter forks: the signal must reach the reader itself.
        board.exec(["pkill", "-TERM", "-x", "reader"])
        for reader in running:
            counted.take(reader.communicate(timeout=30)[0])
    finally:
        for reader in running:
            reader.kill()
            reader.wait()


def left_behind(board: Board, built: dict[str, Built]) -> dict[str, int]:
    """Mounts that PID 1 sees, and loop devices that hold an image of ours."""
    mounts = len(board.exec(["cat", "/proc/1/mountinfo"]).stdout.splitlines())
    images = {f"{image}.raw" for one in built.values() for links in one.images.values() for image in links.values()}
    backing = [path.read_text().strip() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    return {"mounts": mounts, "loops": sum(1 for path in backing if Path(path).name in images)}


# -- poses


def poses(rounds: int) -> dict[str, Any]:
    """Model changes and bare restarts in turns, as a viewer sees them."""
    stopped: dict[str, list[float]] = {"change": [], "bare": []}
    with tempfile.TemporaryDirectory(prefix="avocado-bench-") as folder, Board.create("bench-poses") as board:
        project = Reference.start(Path(folder) / "project")
        project.use_model(FIRST_MODEL)
        project.provision(board)
        board.boot()
        wait_until_serving(board)
        project.use_model(NEW_MODEL)
        project.deploy(board)
        with board.forward(PAGE_PORT) as page, PoseReader(page.port) as reader:
            for _ in range(rounds):
                for name, work in (("change", swap_model), ("bare", restart_bare)):
                    stopped[name].append(gap_of(board, reader, work))
    medians = {name: statistics.median(values) for name, values in stopped.items()}
    ratio = round(medians["change"] / medians["bare"], 3)
    return {"rounds": rounds, "stopped_ms": stopped, "median_ms": medians, "ratio": ratio, "limit": LIMIT_FACTOR}


def gap_of(board: Board, reader: PoseReader, work: Any) -> float:
    """How long poses stopped, milliseconds. It begins and ends with the NPU answering."""
    reader.wait_for(lambda seen: seen.backend == "npu", 60, since=time.monotonic())
    time.sleep(QUIET_S)  # what the round before began is over
    began = time.monotonic()
    reader.wait_for(lambda seen: True, 10, since=began)
    work(board)
    reader.wait_for(lambda seen: seen.backend == "npu", 60, since=time.monotonic())
    return round(reader.longest_gap_ms(began, time.monotonic()), 1)


def swap_model(board: Board) -> None:
    """The runtime before this one: another model, and nothing to transfer."""
    board.exec(["avocadoctl", "rollback"], timeout_s=120)


def restart_bare(board: Board) -> None:
    """The least that puts another set under the service."""
    line = "systemctl stop pose.service && systemd-sysext refresh && systemctl start pose.service"
    board.exec(["sh", "-c", line], timeout_s=120)


# -- the end


def held(figures: dict[str, Any]) -> bool:
    """Whether what issue and documents promise held in this run."""
    switched = figures["files"]
    gapless = switched["ways"]["gapless"]
    kept = all(switched["after"][name] <= switched["before"][name] for name in ("mounts", "loops"))
    clean = gapless["missing"] == gapless["failed"] == gapless["wrong_content"] == 0
    in_time = "poses" not in figures or figures["poses"]["ratio"] <= LIMIT_FACTOR
    return bool(clean and kept and switched["systemd_agrees"] and in_time)


def show(figures: dict[str, Any]) -> None:
    """The tables."""
    switched = figures["files"]
    ways = switched["ways"]
    print(f"{'files':20}" + "".join(f"{way:>14}" for way in WAYS))
    for name in ways["gapless"]:
        print(f"{name:20}" + "".join(f"{ways[way][name]:>14}" for way in WAYS))
    print(f"before {switched['before']}, after {switched['after']}, systemd agrees: {switched['systemd_agrees']}")
    if "poses" in figures:
        found = figures["poses"]
        medians = found["median_ms"]
        print(f"poses stopped, median of {found['rounds']}: change {medians['change']:.0f} ms, ", end="")
        print(f"bare {medians['bare']:.0f} ms, ratio {found['ratio']} (limit {found['limit']})")
    print(f"load {figures['load_before']:.1f} to {figures['load_after']:.1f}")


if __name__ == "__main__":
    sys.exit(main())

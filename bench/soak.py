"""Hours in minutes, on two virtual boards: full rate, a fault every few seconds, a new model every minute. What grows?

To the first board each minute brings a model it has never seen, as a signed delta; there the agent and the board itself
live through the whole run. On the second one the pose service does. Both get one fault of the NPU after the other, each
of which must be recovered. Meanwhile a sampler on each board counts what the three hold. A straight line is fitted to
the median of every minute of the second half (caches fill in the first); a count grows when the whole interval of its
slope lies above zero. The intervals are as wide as it takes for all of them together to hold with 95 %.

No other board may run on this host meanwhile: its loop devices would be counted. Writes build/bench/soak.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.growth import LEAST, Growth, Point, growth
from tests.device import nspawn
from tests.device.board import Board
from tests.device.reference import NEW_MODEL, Reference, wait_until_serving
from tests.models import shift_model

ROOT = Path(__file__).parents[1]
FAULTS = ("hang", "crash", "error", "spin", "wrong", "abort", "slow:300")
PERIOD_S = 60.0
# The virtual profile takes a fault for a first one when the NPU was well for three seconds.
CALM_S = 3.5
SAMPLE_S = 2.0
# More than a shared machine answers; much more, and decoding what nobody looks at would take the time of the rest.
FULL_RATE_FPS = 60
ERROR = 0.05


@dataclass(slots=True)
class Tally:
    """What happened."""

    frames: int = 0
    unanswered: int = 0
    fallbacks: int = 0
    swaps: int = 0
    moved_bytes: int = 0
    faults: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAULTS, 0))
    unrecovered: list[str] = field(default_factory=list)

    def count(self, inference: Mapping[str, Any]) -> None:
        """Add what one life of the service did."""
        self.frames += inference["frames"]
        self.unanswered += inference["unanswered"]
        self.fallbacks += inference["fallbacks"]


def main() -> int:
    """0 when nothing grows, every fault was recovered and every frame answered."""
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=int, default=20, help=f"at least {2 * LEAST} (default 20)")
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench/soak.json")
    arguments = parser.parse_args()
    if arguments.minutes < 2 * LEAST:
        parser.error(f"fewer than {2 * LEAST} minutes say nothing about growth")
    load_before = os.getloadavg()[0]
    tally = Tally()
    with (
        tempfile.TemporaryDirectory(prefix="avocado-soak-") as folder,
        Board.create("soak-swaps") as swaps,
        Board.create("soak-stays") as stays,
    ):
        project = provisioned(Path(folder) / "swaps", swaps)
        provisioned(Path(folder) / "stays", stays)
        files = {"swaps": Path(folder) / "swaps.json", "stays": Path(folder) / "stays.json"}
        with sampling(swaps, files["swaps"]), sampling(stays, files["stays"]):
            for index in range(arguments.minutes):
                minute(swaps, stays, project, tally, index)
                if sys.stderr.isatty():
                    print(
                        f"minute {index + 1} of {arguments.minutes}: {sum(tally.faults.values())} faults",
                        file=sys.stderr,
                    )
            tally.count(describe(swaps))
            tally.count(describe(stays))
        samples = {name: [json.loads(line) for line in file.read_text().splitlines()] for name, file in files.items()}
    slopes = fitted(samples["swaps"], samples["stays"])
    document = {
        **asdict(tally),
        "minutes": arguments.minutes,
        "load": [load_before, os.getloadavg()[0]],
        "slopes_per_minute": {name: asdict(slope) for name, slope in slopes.items()},
        "samples": samples,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    show(document, slopes)
    clean = not tally.unanswered and not tally.unrecovered and tally.frames and tally.swaps == arguments.minutes
    return 0 if clean and not any(slope.grows for slope in slopes.values()) else 1


def provisioned(folder: Path, board: Board) -> Reference:
    """The reference application at full rate on a booted board that serves."""
    project = Reference.start(folder)
    settings = project.folder / "pose.toml"
    settings.write_text(settings.read_text().replace("fps = 30", f"fps = {FULL_RATE_FPS}"))
    project.provision(board)
    board.boot()
    wait_until_serving(board)
    return project


@contextmanager
def sampling(board: Board, out: Path) -> Iterator[None]:
    """The sampler runs on the board meanwhile."""
    init = nspawn.init_pid(board.slot.groups)
    if init is None:
        raise SystemExit("the board is gone")
    program = Path(__file__).with_name("soak_sampler.py").read_text()
    line = [*nspawn.inside(init), "python3", "-c", program, str(SAMPLE_S)]
    # The end of the pipe tells it to stop: a signal would reach nsenter, and not what that started.
    with out.open("wb") as output, subprocess.Popen(line, stdin=subprocess.PIPE, stdout=output):
        yield


def minute(swaps: Board, stays: Board, project: Reference, tally: Tally, index: int) -> None:
    """A new model for one board, then faults for both until the minute is over."""
    until = time.monotonic() + PERIOD_S
    model = shift_model(NEW_MODEL, project.folder / f"model-{index}", version=f"9.0.{index}", seed=index + 2)
    tally.count(describe(swaps))
    project.use_model(model)
    tally.moved_bytes += project.deploy(swaps).document["moved_bytes"]
    tally.swaps += 1
    wait_until_serving(swaps)
    faults = itertools.cycle(FAULTS[index % len(FAULTS) :] + FAULTS[: index % len(FAULTS)])
    while time.monotonic() < until:
        time.sleep(CALM_S)
        fault = next(faults)
        for board in (swaps, stays):
            tally.faults[fault] += 1
            said = board.exec(["avocado-infer", "inject", fault], timeout_s=45, check=False)
            if said.returncode != 0:
                tally.unrecovered.append(f"{fault}: {said.stdout}{said.stderr}")


def describe(board: Board) -> dict[str, Any]:
    """The service's own document."""
    name, path = "org.avocado.Inference1", "/org/avocado/Inference1"
    said = board.exec(["busctl", "--json=short", "call", name, path, name, "Describe"]).stdout
    document: dict[str, Any] = json.loads(json.loads(said)["data"][0])
    return document


# -- what grows


def fitted(swaps: Sequence[Mapping[str, Any]], stays: Sequence[Mapping[str, Any]]) -> dict[str, Growth]:
    """The slope of every count."""
    parts = {"agent": swaps, "board": swaps, "service": stays}
    counted = [(part, name) for part, samples in parts.items() for name in samples[0][part] if name != "main_pid"]
    slopes = {}
    for part, name in counted:
        points = by_minute(parts[part], part, name)
        slopes[f"{part} {name}"] = growth(points[len(points) // 2 :], ERROR / len(counted))
    return slopes


def by_minute(samples: Sequence[Mapping[str, Any]], part: str, name: str) -> list[Point]:
    """The median of each minute."""
    minutes: defaultdict[int, list[float]] = defaultdict(list)
    for sample in samples:
        minutes[int((sample["at"] - samples[0]["at"]) // PERIOD_S)].append(sample[part][name])
    return [(float(at), statistics.median(values)) for at, values in sorted(minutes.items())]


def show(document: Mapping[str, Any], slopes: Mapping[str, Growth]) -> None:
    """The tables."""
    for name in ("minutes", "frames", "unanswered", "fallbacks", "swaps", "moved_bytes", "load"):
        print(f"{name:14}{document[name]!s:>20}")
    for fault, count in document["faults"].items():
        print(f"{fault:14}{count:>20}")
    print(f"{'unrecovered':14}{len(document['unrecovered']):>20}")
    print(f"\n{'a minute':28}{'slope':>12}{'+-':>12}{'points':>8}")
    for name, slope in slopes.items():
        print(f"{name:28}{slope.slope:>12.3f}{slope.half:>12.3f}{slope.count:>8}{'   grows' if slope.grows else ''}")
    for line in document["unrecovered"]:
        print(line)


if __name__ == "__main__":
    sys.exit(main())

"""Hours in minutes, on the virtual board: full rate, a fault every few seconds, a new model every minute. What grows?

Each minute a model that the board has never seen arrives as a signed delta, and between two of them the NPU is given
one fault after the other, each of which must be recovered. Meanwhile a sampler on the board counts what the agent, the
pose service and the board itself hold. A straight line is fitted to each count:

- the agent and the board live through the whole run: over the medians of the minutes of its second half, since caches
  fill in the first;
- the pose service starts anew with each model: the mean slope of its lives, without their first seconds and without the
  moments in which a worker is being replaced.

No other board may run on this host meanwhile: its loop devices would be counted.

A count grows when the whole interval of its slope lies above zero. The intervals are as wide as it takes for all of
them together to hold with 95 %. Writes build/bench/soak.json.
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

from bench.growth import LEAST, Growth, Point, growth, growth_within
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
SETTLE_S = 15.0
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
    parser.add_argument("--minutes", type=int, default=20, help=f"at least {LEAST + 2} (default 20)")
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench/soak.json")
    arguments = parser.parse_args()
    if arguments.minutes < LEAST + 2:
        parser.error(f"fewer than {LEAST + 2} minutes say nothing about growth")
    load_before = os.getloadavg()[0]
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="avocado-soak-") as folder, Board.create("soak") as board:
        project = provisioned(Path(folder), board)
        samples = Path(folder) / "samples"
        with sampling(board, samples):
            for index in range(arguments.minutes):
                minute(board, project, tally, index, arguments.minutes)
        taken = [json.loads(line) for line in samples.read_text().splitlines()]
    slopes = fitted(taken)
    document = {
        **asdict(tally),
        "minutes": arguments.minutes,
        "load": [load_before, os.getloadavg()[0]],
        "slopes_per_minute": {name: asdict(slope) for name, slope in slopes.items()},
        "samples": taken,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    show(document, slopes)
    clean = not tally.unanswered and not tally.unrecovered and tally.frames and tally.swaps == arguments.minutes
    return 0 if clean and not any(slope.grows for slope in slopes.values()) else 1


def provisioned(folder: Path, board: Board) -> Reference:
    """The reference application at full rate on a booted board that serves."""
    project = Reference.start(folder / "project")
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


def minute(board: Board, project: Reference, tally: Tally, index: int, minutes: int) -> None:
    """A new model, then faults until the minute is over."""
    until = time.monotonic() + PERIOD_S
    model = shift_model(NEW_MODEL, project.folder / f"model-{index}", version=f"9.0.{index}", seed=index + 2)
    tally.count(describe(board))
    project.use_model(model)
    tally.moved_bytes += project.deploy(board).document["moved_bytes"]
    tally.swaps += 1
    wait_until_serving(board)
    faults = itertools.cycle(FAULTS[index % len(FAULTS) :] + FAULTS[: index % len(FAULTS)])
    while time.monotonic() < until:
        time.sleep(CALM_S)
        fault = next(faults)
        tally.faults[fault] += 1
        said = board.exec(["avocado-infer", "inject", fault], timeout_s=45, check=False)
        if said.returncode != 0:
            tally.unrecovered.append(f"{fault}: {said.stdout}{said.stderr}")
    if index == minutes - 1:
        tally.count(describe(board))
    if sys.stderr.isatty():
        print(f"minute {index + 1} of {minutes}: {sum(tally.faults.values())} faults", file=sys.stderr)


def describe(board: Board) -> dict[str, Any]:
    """The service's own document."""
    name, path = "org.avocado.Inference1", "/org/avocado/Inference1"
    said = board.exec(["busctl", "--json=short", "call", name, path, name, "Describe"]).stdout
    document: dict[str, Any] = json.loads(json.loads(said)["data"][0])
    return document


# -- what grows


def fitted(samples: Sequence[Mapping[str, Any]]) -> dict[str, Growth]:
    """The slope of every count."""
    lasting = {(part, name) for part in ("agent", "board") for name in samples[0][part]}
    passing = {("service", name) for name in samples[0]["service"]}
    counted = sorted((lasting | passing) - {("agent", "main_pid"), ("service", "main_pid")})
    error = ERROR / len(counted)
    slopes = {}
    for part, name in counted:
        if part == "service":
            slopes[f"{part} {name}"] = growth_within(lives(samples, name), error)
        else:
            points = by_minute(samples, part, name)
            slopes[f"{part} {name}"] = growth(points[len(points) // 2 :], error)
    return slopes


def by_minute(samples: Sequence[Mapping[str, Any]], part: str, name: str) -> list[Point]:
    """The median of each minute."""
    minutes: defaultdict[int, list[float]] = defaultdict(list)
    for sample in samples:
        minutes[int((sample["at"] - samples[0]["at"]) // PERIOD_S)].append(sample[part][name])
    return [(float(at), statistics.median(values)) for at, values in sorted(minutes.items())]


def lives(samples: Sequence[Mapping[str, Any]], name: str) -> list[list[Point]]:
    """What each life of the service held once it had settled, in minutes of its age."""
    found: defaultdict[int, list[tuple[float, Mapping[str, float]]]] = defaultdict(list)
    born: dict[int, float] = {}
    for sample in samples:
        service = sample["service"]
        age_s = sample["at"] - born.setdefault(service["main_pid"], sample["at"])
        if service["main_pid"] and age_s >= SETTLE_S:
            found[service["main_pid"]].append((age_s / 60, service))
    return [[(age, held[name]) for age, held in complete(life, name)] for life in found.values()]


def complete(
    life: Sequence[tuple[float, Mapping[str, float]]], name: str
) -> Sequence[tuple[float, Mapping[str, float]]]:
    """Without the moments in which a worker is missing; of the number of processes, every moment."""
    usual = statistics.median(held["processes"] for _, held in life)
    return [(age, held) for age, held in life if name == "processes" or held["processes"] >= usual]


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

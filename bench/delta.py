"""How many bytes a change moves: our deltas beside casync, zchunk, xdelta3, zstd --patch-from, bsdiff, a block index.

All on the same pairs of images in one run: bytes, seconds and peak memory of making and of applying, each also as a
ratio to ours. Every result is compared with the image it should be. Then our memory on a small and on a large image,
and what was to be reached, line by line. Writes build/bench/delta.json. `PAIR="the head"` measures that pair only.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.delta_goals import Cost, Measured, Row, goals
from bench.delta_images import PAIRS, ROOT, TREE_PAIRS, plain_tree
from bench.delta_methods import METHODS, install_tools, run
from inference.errors import InferenceError
from tests.deltas import write_pair

OURS = "ours"
# The images whose cost in memory is to be the same.
MEMORY_BYTES = {"3 MB": 3 << 20, "1 GiB": 1 << 30}

# What the agent does with a delta, in a process that runs already; the quickest of five.
INSIDE = """
import json, sys, time
from pathlib import Path
from agent.delta.apply import apply_delta
from agent.delta.stream import file_chunks
old, delta, out = map(Path, sys.argv[1:])
found = []
for _ in range(5):
    wall, cpu = time.monotonic(), time.process_time()
    apply_delta(old, file_chunks(delta), out)
    found.append((time.monotonic() - wall, time.process_time() - cpu))
print(json.dumps([round(min(figures), 4) for figures in zip(*found)]))
"""


def measure(pair: str, old: Path, new: Path, work: Path) -> list[Row]:
    """Every method on one pair."""
    rows: list[Row] = []
    for name, method in METHODS.items():
        with tempfile.TemporaryDirectory(dir=work) as scratch:
            size, create, apply = method(old, new, Path(scratch))
            out = Path(scratch) / "out"
            if apply is not None and not filecmp.cmp(out, new, shallow=False):
                raise SystemExit(f"bench-delta: {name} made another image of {pair}")
        rows.append(Row(pair, name, size, create, apply))
        print(_line(rows[-1], rows[0]), flush=True)
    return rows


HEADINGS = ("bytes", "create s", "MiB", "apply s", "MiB")
WIDTHS = (11, 8, 5, 7, 5)


def _figures(row: Row) -> list[float | None]:
    """In the order of `HEADINGS`; None where the method has no step of its own."""
    found: list[float | None] = [row.size_bytes]
    for cost in (row.create, row.apply):
        found += [cost.seconds, cost.rss_kib / 1024] if cost else [None, None]
    return found


def _ratios(row: Row, ours: Row) -> list[float | None]:
    pairs = zip(_figures(row), _figures(ours), strict=True)
    return [mine / base if mine is not None and base else None for mine, base in pairs]


def _line(row: Row, ours: Row) -> str:
    text = f"{row.pair:23} {row.method:18}"
    for heading, width, figure, ratio in zip(HEADINGS, WIDTHS, _figures(row), _ratios(row, ours), strict=True):
        places = 2 if heading.endswith(" s") else 0
        text += f" {figure:{width},.{places}f} {ratio or 0:9.2f}" if figure is not None else " " * (width + 11)
    return text


def speed(old: Path, new: Path, work: Path) -> dict[str, float]:
    """Applying inside a running process, beside `zstd -d` of the full image and its sha256: wall and CPU seconds."""
    delta, full_image, out = work / "delta", work / "full", work / "out"
    run([sys.executable, "-m", "agent.cli", "delta", "create", old, new, delta])
    run(["zstd", "-q", "-f", "-19", new, "-o", full_image])
    inside = subprocess.run(
        [sys.executable, "-c", INSIDE, old, delta, out], stdout=subprocess.PIPE, check=True, cwd=ROOT
    ).stdout
    wall_s, cpu_s = json.loads(inside)
    peers = [
        (run(["zstd", "-q", "-f", "-d", full_image, "-o", out]), run(["sha256sum", out]))  # as an updater without us
        for _ in range(5)
    ]
    return {
        "ours_s": wall_s,
        "ours_cpu_s": cpu_s,
        "zstd_sha256_s": min(unpack.seconds + digest.seconds for unpack, digest in peers),
        "zstd_sha256_cpu_s": min(unpack.cpu_s + digest.cpu_s for unpack, digest in peers),
    }


def memory(work: Path) -> dict[str, int]:
    """KiB above a bare Python that applying takes at its peak, on images of these sizes; every segment a costly one."""
    bare = run([sys.executable, "-I", "-c", "pass"])
    found = {}
    for name, size in MEMORY_BYTES.items():
        with tempfile.TemporaryDirectory(dir=work) as scratch:
            folder = Path(scratch)
            write_pair(folder, size)
            tool = [sys.executable, "-m", "agent.cli", "delta", "apply"]
            cost = run([*tool, folder / "old", folder / "delta", folder / "out"])
        found[name] = cost.rss_kib - bare.rss_kib
        print(
            f"{name + ' image':23} {'ours':18} applied in {found[name] / 1024:.1f} MiB above a bare Python", flush=True
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Make the pairs, measure every method on each, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=list(PAIRS), action="append", help="only this pair; may be repeated")
    chosen = parser.parse_args(argv).pair or list(PAIRS)
    install_tools()
    rows: list[Row] = []
    speeds: dict[str, dict[str, float]] = {}
    why_not = {pair: f'give PAIR="{pair}"' for pair in PAIRS if pair not in chosen}
    plain: Cost | None = None
    columns = "".join(f" {heading:>{width}}    / ours" for heading, width in zip(HEADINGS, WIDTHS, strict=True))
    print(f"{'pair':23} {'method':18}{columns}")
    with tempfile.TemporaryDirectory(prefix="bench-delta-") as scratch:
        work = Path(scratch)
        for pair in chosen:
            try:
                old, new = PAIRS[pair](work)
            except InferenceError as reason:
                why_not[pair] = str(reason)
                print(f"{pair:23} NOT MEASURED: {reason}", flush=True)
                continue
            rows += measure(pair, old, new, work)
            with tempfile.TemporaryDirectory(dir=work) as place:
                speeds[pair] = speed(old, new, Path(place))
        if set(chosen) & set(TREE_PAIRS):
            plain = run(["zstd", "-q", "-f", "-19", plain_tree(work), "-o", work / "plain.zst"])
        above = memory(work)
    reached = goals(Measured(rows, above, speeds, plain, why_not))
    for goal in reached:
        print(goal.line())
    out = ROOT / "build" / "bench" / "delta.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "load_average": os.getloadavg(),
        "rows": [_with_ratios(row, rows) for row in rows],
        "apply_speed": speeds,
        "apply_kib_above_bare_python": above,
        "plain_tree_zstd_19": asdict(plain) if plain else None,
        "goals": [asdict(goal) | {"verdict": goal.verdict} for goal in reached],
    }
    out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {out.relative_to(ROOT)}")
    return 0


def _with_ratios(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    ours = next(other for other in rows if (other.pair, other.method) == (row.pair, OURS))
    names = ("size", "create_seconds", "create_rss", "apply_seconds", "apply_rss")
    ratios = {
        name: None if value is None else round(value, 3) for name, value in zip(names, _ratios(row, ours), strict=True)
    }
    return {**asdict(row), "to_ours": ratios}


if __name__ == "__main__":
    sys.exit(main())

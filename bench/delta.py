"""How many bytes a change moves: our deltas beside casync, zchunk, xdelta3, zstd --patch-from, bsdiff, a block index.

All on the same pairs of images in one run: bytes, seconds and peak memory of making and of applying, each also as a
ratio to ours. Every result is compared with the image it should be. Prints the table and what it was to reach, writes
build/bench/delta.json. `RETRAINED="OLD.tflite NEW.tflite"` adds a pair of models that were really trained apart.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.delta_goals import Cost, Row, goals
from bench.delta_images import ROOT, model_pairs, plain_tree, retrained_pair, tree_pairs

TOOLS = {
    "casync": "casync",
    "zck": "zchunk",
    "xdelta3": "xdelta3",
    "bsdiff": "bsdiff",
    "zstd": "zstd",
    "mkfs.erofs": "erofs-utils",
}
BLOCK_BYTES = 4096


# A process keeps the peak memory of the one that forked it, so the forking is left to a small one.
SPAWN = """
import json, os, resource, subprocess, sys, time
began = time.monotonic()
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
if done.returncode:
    sys.stderr.buffer.write(done.stderr)
seconds = time.monotonic() - began
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([done.returncode, round(seconds, 3), round(used.ru_utime + used.ru_stime, 3), used.ru_maxrss]))
"""

# What the agent does with a delta, in a process that runs already; the quickest of five.
INSIDE = """
import json, sys, time
from pathlib import Path
from agent.delta.apply import apply_delta, file_chunks
old, delta, out = map(Path, sys.argv[1:])
found = []
for _ in range(5):
    wall, cpu = time.monotonic(), time.process_time()
    apply_delta(old, file_chunks(delta), out)
    found.append((time.monotonic() - wall, time.process_time() - cpu))
print(json.dumps([round(min(figures), 4) for figures in zip(*found)]))
"""


def run(argv: Sequence[str | Path]) -> Cost:
    """A command to its end, with what it cost."""
    spawn = [sys.executable, "-I", "-S", "-c", SPAWN, *map(str, argv)]
    finished = subprocess.run(spawn, stdout=subprocess.PIPE, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    status, seconds, cpu_s, rss_kib = json.loads(finished.stdout)
    if status:
        raise SystemExit(f"bench-delta: {argv[0]} ended with {status}")
    return Cost(seconds, cpu_s, rss_kib)


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


def ours(old: Path, new: Path, work: Path) -> tuple[int, Cost, Cost]:
    """The delta format of this project, through its own command."""
    tool = [sys.executable, "-m", "agent.cli", "delta"]
    create = run([*tool, "create", old, new, work / "delta"])
    apply = run([*tool, "apply", old, work / "delta", work / "out"])
    return (work / "delta").stat().st_size, create, apply


def patch_from(old: Path, new: Path, work: Path) -> tuple[int, Cost, Cost]:
    """The whole base as zstd's dictionary."""
    create = run(["zstd", "-q", "-f", "-19", "--long=27", f"--patch-from={old}", new, "-o", work / "delta"])
    apply = run(["zstd", "-q", "-f", "-d", "--long=27", f"--patch-from={old}", work / "delta", "-o", work / "out"])
    return (work / "delta").stat().st_size, create, apply


def xdelta(old: Path, new: Path, work: Path) -> tuple[int, Cost, Cost]:
    """xdelta3 with a source window that fits a small board."""
    window = ["-B", str(4 << 20)]
    create = run(["xdelta3", "-f", "-9", "-S", "none", *window, "-e", "-s", old, new, work / "delta"])
    apply = run(["xdelta3", "-f", "-d", *window, "-s", old, work / "delta", work / "out"])
    return (work / "delta").stat().st_size, create, apply


def bsdiff(old: Path, new: Path, work: Path) -> tuple[int, Cost, Cost]:
    """bsdiff 4."""
    create = run(["bsdiff", old, new, work / "delta"])
    return (work / "delta").stat().st_size, create, run(["bspatch", old, work / "out", work / "delta"])


def casync(old: Path, new: Path, work: Path) -> tuple[int, Cost, Cost]:
    """The index and the chunks that a store of the old image lacks."""
    for name in ("old.store", "new.store"):
        (work / name).mkdir()
    run(["casync", "make", f"--store={work / 'old.store'}", work / "old.caibx", old])
    create = run(["casync", "make", f"--store={work / 'new.store'}", work / "new.caibx", new])
    stores = [f"--store={work / 'new.store'}", f"--extra-store={work / 'old.store'}"]
    apply = run(["casync", "extract", *stores, work / "new.caibx", work / "out"])
    chunks = {path.name: path.stat().st_size for path in (work / "new.store").rglob("*.cacnk")}
    held = {path.name for path in (work / "old.store").rglob("*.cacnk")}
    moved = sum(size for name, size in chunks.items() if name not in held)
    return moved + (work / "new.caibx").stat().st_size, create, apply


def zchunk(old: Path, new: Path, work: Path) -> tuple[int, Cost, None]:
    """The header and the chunks the old file lacks, as zck_delta_size says."""
    for name, path in (("old", old), ("new", new)):
        cost = run(["zck", "-o", work / f"{name}.zck", path])
    report = subprocess.run(
        ["zck_delta_size", work / "old.zck", work / "new.zck"], capture_output=True, text=True, check=True
    ).stdout
    size = next(line for line in report.splitlines() if line.startswith("Would download"))
    return int(size.split()[2]), cost, None


def block_index(old: Path, new: Path, work: Path) -> tuple[int, None, None]:
    """New 4 KiB blocks, compressed together, beside an index of all: what a block-based updater moves at best."""
    data = old.read_bytes()
    held = {hashlib.sha256(data[at : at + BLOCK_BYTES]).digest() for at in range(0, len(data), BLOCK_BYTES)}
    data = new.read_bytes()
    blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    (work / "blocks").write_bytes(b"".join(b for b in blocks if hashlib.sha256(b).digest() not in held))
    run(["zstd", "-q", "-f", "-19", work / "blocks", "-o", work / "delta"])
    return (work / "delta").stat().st_size + 32 * len(blocks), None, None


def full(old: Path, new: Path, work: Path) -> tuple[int, Cost, Cost]:
    """No delta: the image through zstd -19."""
    create = run(["zstd", "-q", "-f", "-19", new, "-o", work / "delta"])
    return (work / "delta").stat().st_size, create, run(["zstd", "-q", "-f", "-d", work / "delta", "-o", work / "out"])


Method = Callable[[Path, Path, Path], tuple[int, Cost | None, Cost | None]]
METHODS: dict[str, Method] = {
    "ours": ours,
    "zstd -19 full": full,
    "zstd --patch-from": patch_from,
    "xdelta3 -B 4M": xdelta,
    "bsdiff": bsdiff,
    "casync": casync,
    "zchunk": zchunk,
    "4 KiB blocks": block_index,
}


def measure(pair: str, old: Path, new: Path, work: Path) -> list[Row]:
    """Every method on one pair."""
    rows = []
    for name, method in METHODS.items():
        with tempfile.TemporaryDirectory(dir=work) as scratch:
            size, create, apply = method(old, new, Path(scratch))
            out = Path(scratch) / "out"
            if apply is not None and not filecmp.cmp(out, new, shallow=False):
                raise SystemExit(f"bench-delta: {name} made another image of {pair}")
        rows.append(Row(pair, name, size, create, apply))
        print(_line(rows[-1], rows[0]), flush=True)
    return rows


def _line(row: Row, best: Row) -> str:
    create = f"{row.create.seconds:7.2f} s {row.create.rss_kib >> 10:5} MiB" if row.create else " " * 19
    apply = f"{row.apply.seconds:7.2f} s {row.apply.rss_kib >> 10:5} MiB" if row.apply else " " * 19
    ratio = row.size_bytes / best.size_bytes
    return f"{row.pair:24} {row.method:18} {row.size_bytes:>11,} {ratio:7.2f}   {create}   {apply}"


def main() -> int:
    """Make the pairs, measure every method on each, print and write the table."""
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], check=True)
    rows: list[Row] = []
    print(f"{'pair':24} {'method':18} {'bytes':>11} {'/ ours':>7}   {'create':>19}   {'apply':>19}")
    speeds: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-delta-") as scratch:
        work = Path(scratch)
        for pairs in (model_pairs, retrained_pair, tree_pairs):
            for pair, old, new in pairs(work):
                rows += measure(pair, old, new, work)
                with tempfile.TemporaryDirectory(dir=work) as place:
                    speeds[pair] = speed(old, new, Path(place))
        plain = plain_tree(work)
        plain_bytes = plain.stat().st_size
        plain_cost = run(["zstd", "-q", "-f", "-19", plain, "-o", work / "plain.zst"])
    out = ROOT / "build" / "bench" / "delta.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    bare = run([sys.executable, "-I", "-c", "pass"])
    reached = goals(rows, bare.rss_kib, speeds, plain_cost)
    for goal in reached:
        print(f"{goal['name']:62} {goal['measured']:>7} of {goal['bound']:<5} {goal['holds']}")
    document = {
        "bare_python_rss_kib": bare.rss_kib,
        "load_average": os.getloadavg(),
        "apply_speed": speeds,
        "plain_tree": {"size_bytes": plain_bytes, "zstd_19": asdict(plain_cost)},
        "goals": reached,
        "rows": [_with_ratio(row, rows) for row in rows],
    }
    out.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {out.relative_to(ROOT)}")
    return 0


def _with_ratio(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    best = next(other for other in rows if other.pair == row.pair and other.method == "ours")
    return {**asdict(row), "size_to_ours": round(row.size_bytes / best.size_bytes, 3)}


if __name__ == "__main__":
    sys.exit(main())

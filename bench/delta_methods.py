"""The ways to move a change that the delta benchmark compares: the bytes, and what making and applying them cost."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.delta_goals import Cost
from bench.delta_images import ROOT

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


def run(argv: Sequence[str | Path]) -> Cost:
    """A command to its end, with what it cost."""
    spawn = [sys.executable, "-I", "-S", "-c", SPAWN, *map(str, argv)]
    finished = subprocess.run(spawn, stdout=subprocess.PIPE, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    status, seconds, cpu_s, rss_kib = json.loads(finished.stdout)
    if status:
        raise SystemExit(f"bench-delta: {argv[0]} ended with {status}")
    return Cost(seconds, cpu_s, rss_kib)


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


def install_tools() -> None:
    """The peers are installed."""
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], check=True)

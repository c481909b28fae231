"""What the delta benchmark is to reach, worked out from its rows. Printed and recorded; nothing fails on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SMALL_BOARD_KIB = 64 << 10


@dataclass(frozen=True, slots=True)
class Cost:
    """One command: wall and CPU seconds, and peak resident memory."""

    seconds: float
    cpu_s: float
    rss_kib: int


@dataclass(frozen=True, slots=True)
class Row:
    """One method on one pair. `apply` is None where the method has no step of its own here."""

    pair: str
    method: str
    size_bytes: int
    create: Cost | None
    apply: Cost | None


def goals(
    rows: Sequence[Row], bare_kib: int, speeds: Mapping[str, Mapping[str, float]], plain: Cost
) -> list[dict[str, Any]]:
    """Each line of the goals that this run measured: `measured` is to be at most `bound`."""
    found: list[dict[str, Any]] = []

    def add(name: str, measured: float, bound: float) -> None:
        holds = "holds" if measured <= bound else "MISSED"
        found.append({"name": name, "measured": round(measured, 3), "bound": bound, "holds": holds})

    def compare(pair: str, what: str, among: Callable[[Row], bool], bound: float) -> None:
        ours = _find(rows, pair, "ours")
        peers = [row.size_bytes for row in rows if row.pair == pair and row.method != "ours" and among(row)]
        if ours and peers:
            add(f"{pair}: bytes to {what}", ours.size_bytes / min(peers), bound)

    compare("all weights shifted", "the smallest peer in 64 MiB", _fits, 0.30)
    for pair in ("one tenth", "the head"):
        compare(pair, "bsdiff", lambda row: row.method == "bsdiff", 1.05)
    for pair in ("numpy upgraded", "one source file edited"):
        compare(pair, "the smallest peer in 64 MiB", _fits, 1.05)
    compare("retrained", "zstd -19 of the whole image", lambda row: row.method == "zstd -19 full", 1.01)
    ours = [row for row in rows if row.method == "ours"]
    most = max(row.apply.rss_kib for row in ours if row.apply)
    add("apply: MiB above python3 -I -c pass", (most - bare_kib) / 1024, 24)
    for pair, figures in speeds.items():
        add(f"{pair}: apply wall to zstd -d and sha256", figures["ours_s"] / figures["zstd_sha256_s"], 2)
        add(f"{pair}: apply CPU to zstd -d and sha256", figures["ours_cpu_s"] / figures["zstd_sha256_cpu_s"], 2)
    for pair in ("one source file edited", "numpy upgraded"):
        row = _find(rows, pair, "ours")
        if row and row.create:
            add(f"{pair}: create wall to zstd -19 of the plain tree", row.create.seconds / plain.seconds, 0.5)
            add(f"{pair}: create CPU to zstd -19 of the plain tree", row.create.cpu_s / plain.cpu_s, 0.5)
    return found


def _fits(row: Row) -> bool:
    """It applies on a small board; what has no apply of its own streams chunks."""
    return row.apply is None or row.apply.rss_kib <= SMALL_BOARD_KIB


def _find(rows: Sequence[Row], pair: str, method: str) -> Row | None:
    return next((row for row in rows if (row.pair, row.method) == (pair, method)), None)

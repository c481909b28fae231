"""How avocadoctl prints: aligned columns for people, one JSON value for machines, times as how long ago."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any


def print_json(value: Any) -> None:
    """One JSON value on stdout."""
    json.dump(value, sys.stdout, indent=2)
    sys.stdout.write("\n")


def tell_it_goes_on(number: int, host: str = "") -> None:
    """Somebody stops watching a change, by Ctrl-C: it is the board's, and ends by its own rules."""
    there = f" -H {host}" if host else ""
    print(
        f"avocadoctl: change {number} goes on{f' on {host}' if host else ''} without you\n"
        f"  try: to end it: avocadoctl{there} cancel {number}; how it ended: avocadoctl{there} history show {number}",
        file=sys.stderr,
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the last one is not padded."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        lines.append("  ".join([*padded, row[-1]]).rstrip())
    return "\n".join(lines)


def size(count: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def ago(seconds: float) -> str:
    """`90` -> `1 min`."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length or (seconds >= length and unit == "min"):
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"

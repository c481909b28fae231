"""Finds which stretches of a new file stand in the old one: whole blocks first, then to the byte.

An index of the old file's aligned blocks finds most of an EROFS image at once, since such images keep files on block
boundaries. Each match is then grown byte by byte into its surroundings, and what is left is probed: a few short
strings of it are looked for in the whole old file, which finds stretches that moved by less than a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from agent.delta.source import Source

BLOCK_BYTES = 4096
_PROBE_BYTES = 48
_PROBES_PER_GAP = 6
_PROBED_GAP_BYTES = 256
# Each probe reads the old file once; this bounds what all of them read.
_PROBE_BUDGET_BYTES = 6 << 30

Buffer = bytes | Source


@dataclass(frozen=True, slots=True)
class Run:
    """`length` bytes of the new file at `start`; `offset` is where the old file holds the same, None for nowhere."""

    start: int
    length: int
    offset: int | None


def find_runs(old: Buffer, new: Buffer) -> list[Run]:
    """The whole new file as runs, in order."""
    matches = _block_matches(old, new)
    runs = _fill(_grow(matches, old, new), len(new))
    budget = _PROBE_BUDGET_BYTES
    found: list[Run] = []
    for run in runs:
        if run.offset is None and run.length >= _PROBED_GAP_BYTES and old and budget > 0:
            pieces, spent = _probe(run, old, new)
            found.extend(pieces)
            budget -= spent
        else:
            found.append(run)
    return found


def _digest(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=16).digest()


def _block_matches(old: Buffer, new: Buffer) -> list[Run]:
    index: dict[bytes, list[int]] = {}
    for offset in range(0, len(old), BLOCK_BYTES):
        places = index.setdefault(_digest(old[offset : offset + BLOCK_BYTES]), [])
        if len(places) < 64:  # a block of zeros stands everywhere; a few places are enough
            places.append(offset)
    matches: list[Run] = []
    shift = 0
    for start in range(0, len(new), BLOCK_BYTES):
        block = new[start : start + BLOCK_BYTES]
        expected = start + shift
        if expected >= 0 and block == old[expected : expected + len(block)]:
            offset = expected
        else:
            places = index.get(_digest(block), [])
            if not places:
                continue
            offset = min(places, key=lambda place: abs(place - expected))
        shift = offset - start
        last = matches[-1] if matches else None
        if (
            last
            and last.offset is not None
            and last.start + last.length == start
            and last.offset + last.length == offset
        ):
            matches[-1] = Run(last.start, last.length + len(block), last.offset)
        else:
            matches.append(Run(start, len(block), offset))
    return matches


def _grow(matches: list[Run], old: Buffer, new: Buffer) -> list[Run]:
    """Each match, longer at both ends as far as the bytes agree and no neighbour begins."""
    grown: list[Run] = []
    floor = 0
    for position, match in enumerate(matches):
        assert match.offset is not None  # noqa: S101 (matches are built with an offset)
        ceiling = matches[position + 1].start if position + 1 < len(matches) else len(new)
        back = _common_backward(old, match.offset, new, match.start, match.start - floor)
        end = match.start + match.length
        ahead = _common_forward(old, match.offset + match.length, new, end, ceiling - end)
        grown.append(Run(match.start - back, back + match.length + ahead, match.offset - back))
        floor = end + ahead
    return grown


def _fill(matches: list[Run], size: int) -> list[Run]:
    runs: list[Run] = []
    at = 0
    for match in matches:
        if match.start > at:
            runs.append(Run(at, match.start - at, None))
        runs.append(match)
        at = match.start + match.length
    if at < size:
        runs.append(Run(at, size - at, None))
    return runs


def _probe(gap: Run, old: Buffer, new: Buffer) -> tuple[list[Run], int]:
    """The gap with the longest stretches that probing found, and how many bytes of the old file were read for it."""
    end = gap.start + gap.length
    matches: list[Run] = []
    spent = 0
    at = gap.start
    step = max(_PROBED_GAP_BYTES, gap.length // _PROBES_PER_GAP)
    while at + _PROBE_BYTES <= end:
        probe = new[at : at + _PROBE_BYTES]
        offset = -1 if len(set(probe)) < 12 else old.find(probe)
        spent += len(old) if offset < 0 else offset
        if offset < 0:
            at += step
            continue
        floor = matches[-1].start + matches[-1].length if matches else gap.start
        back = _common_backward(old, offset, new, at, at - floor)
        ahead = _common_forward(old, offset, new, at, end - at)
        if back + ahead >= _PROBED_GAP_BYTES:
            matches.append(Run(at - back, back + ahead, offset - back))
        at += max(ahead, step)
    return [_shifted(run, gap.start) for run in _fill([_shifted(m, -gap.start) for m in matches], gap.length)], spent


def _shifted(run: Run, by: int) -> Run:
    return Run(run.start + by, run.length, run.offset)


def _common_forward(old: Buffer, old_at: int, new: Buffer, new_at: int, limit: int) -> int:
    """How many bytes from these places on are the same in both."""
    return _agreeing(
        min(limit, len(old) - old_at, len(new) - new_at),
        lambda same, size: old[old_at + same : old_at + same + size] == new[new_at + same : new_at + same + size],
    )


def _common_backward(old: Buffer, old_at: int, new: Buffer, new_at: int, limit: int) -> int:
    """How many bytes before these places are the same in both."""
    return _agreeing(
        min(limit, old_at, new_at),
        lambda same, size: old[old_at - same - size : old_at - same] == new[new_at - same - size : new_at - same],
    )


def _agreeing(limit: int, agree: Callable[[int, int], bool]) -> int:
    """How far it agrees, up to a limit, in strides that grow and, at the first difference, shrink to single bytes."""
    same, stride = 0, 64
    while same < limit:
        stride = min(stride, limit - same)
        if agree(same, stride):
            same += stride
            stride = min(stride * 4, 1 << 20)
        elif stride == 1:
            break
        else:
            stride = max(1, stride // 8)
            limit = min(limit, same + stride * 8)
    return same

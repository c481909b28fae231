"""Writes the smallest delta it can find between two files, within the format's bounds.

Stretches that stand in the base become COPY. What is left is cut into segments, and for each the ways are tried and
the smallest kept: DATA (alone), PREFIX (against a window of the base), ADD (bytewise difference, which is small where
numbers moved a little, as retrained weights do). Cheap estimates choose which ways are worth the slow compressor.
Files are mapped, not read; a few segments are worked on at a time, one on each processor, and the delta's bytes do not
depend on how many.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from agent.delta import zstd
from agent.delta.apply import file_sha256
from agent.delta.format import (
    MAX_SEGMENT_BYTES,
    MAX_WINDOW_BYTES,
    MIN_WINDOW_BYTES,
    DeltaInfo,
    Op,
    OpKind,
    next_cursor,
    pack_header,
    pack_op,
    pack_trailer,
)
from agent.delta.match import Buffer, Run, find_runs
from agent.delta.output import whole_file

Progress = Callable[[int, int], None]

_QUICK_LEVEL = 3
_BEST_LEVEL = 19
_SMALL_WINDOW_BYTES = 64 * 1024
# A copy this short between two changed stretches costs less inside the segment's frame than as an operation of its
# own with a new frame after it.
_BRIDGED_COPY_BYTES = 64 * 1024
# How much worse than the best an estimate may be and still be tried with the slow compressor.
_WORTH_TRYING = 1.1

# Where a segment stays large, a window of this format's full size is tried, which takes long to search.
_WIDE_FROM_BYTES = 2048
_WIDE_LEVEL = 12
_OPERATION_BYTES = 8
# A difference that stays above this share of its length is noise: a long search finds nothing more in it.
_NOISE = 0.2
# What the quick compressor leaves above this share of its length, the slow one does not make smaller either.
_HOPELESS = 0.98
# The slow compressor holds some 90 MiB for each segment it works on.
_MAX_WORKERS = 4

Candidate = tuple[Op, bytes]


class Effort(StrEnum):
    """How hard to look for a smaller delta."""

    BEST = "best"
    QUICK = "quick"  # a twentieth of the time; for what is only there in case something else fails


def encode_delta(
    base: Path | None,
    result: Path,
    out: Path,
    *,
    effort: Effort = Effort.BEST,
    progress: Progress | None = None,
) -> DeltaInfo:
    """Write to `out` a delta that makes `result` from `base`; without a base, the full transfer.

    `out` appears complete and on disk, or not at all.
    """
    with whole_file(out, base, result) as part:
        info = DeltaInfo(
            base_sha256=file_sha256(base) if base else None,
            base_size_bytes=base.stat().st_size if base else 0,
            result_sha256=file_sha256(result),
            result_size_bytes=result.stat().st_size,
        )
        with _mapped(base) as old, _mapped(result) as new, part.open("wb") as file:
            writer = _Writer(file, info, progress)
            for candidate in _choose(_segments(old, new), old, new, effort):
                writer.add(*candidate)
            writer.finish()
    return info


@contextlib.contextmanager
def _mapped(path: Path | None) -> Iterator[Buffer]:
    if path is None or path.stat().st_size == 0:
        yield b""
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        yield view


class _Writer:
    def __init__(self, file: BinaryIO, info: DeltaInfo, progress: Progress | None) -> None:
        self._file = file
        self._info = info
        self._progress = progress
        self._cursor = 0
        self._produced = 0
        self._crc = 0
        self._write(pack_header(info))

    def add(self, op: Op, payload: bytes) -> None:
        self._write(pack_op(op, self._cursor))
        self._write(payload)
        self._cursor = next_cursor(op, self._cursor)
        self._produced += op.length
        if self._progress:
            self._progress(self._produced, self._info.result_size_bytes)

    def finish(self) -> None:
        self._write(pack_op(Op(OpKind.END, 0), self._cursor))
        self._file.write(pack_trailer(self._crc))

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._crc = zlib.crc32(data, self._crc)


def _choose(segments: Iterator[_Segment], old: Buffer, new: Buffer, effort: Effort) -> Iterator[Candidate]:
    """Each segment's smallest way, in order. zstd lets go of the interpreter, so threads are enough."""
    if effort is Effort.QUICK:
        for segment in segments:
            yield segment.ways[0]
        return
    workers = min(_MAX_WORKERS, os.cpu_count() or 1)
    waiting: deque[Future[Candidate]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for segment in segments:
            waiting.append(pool.submit(segment.smallest, old, new))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _segments(old: Buffer, new: Buffer) -> Iterator[_Segment]:
    runs = find_runs(old, new, lambda _: None)
    shift = 0
    for group in _groups(runs):
        first = group[0]
        if len(group) == 1 and first.offset is not None:
            yield _Segment(first.start, [(Op(OpKind.COPY, first.length, first.offset), b"")])
            shift = first.offset - first.start
            continue
        following = _shift_after(runs, group)
        together = list(_estimate_gap(_span(group), old, new, _shifts(group, shift, following)))
        apart = list(_estimate_apart(group, old, new, shift, following))
        chosen = apart if len(group) > 1 and _cost(apart) <= _cost(together) else together
        yield from chosen
        shift = next((run.offset - run.start for run in reversed(group) if run.offset is not None), shift)


def _groups(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Changed stretches that only short copies part, up to one segment together; long copies stand alone."""
    group: list[Run] = []
    for position, run in enumerate(runs):
        short = run.offset is not None and run.length <= _BRIDGED_COPY_BYTES
        inside = short and group and position + 1 < len(runs)
        if group and (not (run.offset is None or inside) or _length(group) + run.length > MAX_SEGMENT_BYTES):
            yield from _without_tail(group)
            group = []
        if run.offset is None or (inside and group):
            group.append(run)
        else:
            yield [run]
    if group:
        yield from _without_tail(group)


def _without_tail(group: list[Run]) -> Iterator[list[Run]]:
    if group[-1].offset is not None and len(group) > 1:
        yield group[:-1]
        yield group[-1:]
    else:
        yield group


def _length(group: Sequence[Run]) -> int:
    return sum(run.length for run in group)


def _span(group: Sequence[Run]) -> Run:
    return Run(group[0].start, _length(group), None)


def _cost(segments: Sequence[_Segment]) -> int:
    return sum(len(segment.ways[0][1]) + _OPERATION_BYTES for segment in segments)


def _shift_after(runs: Sequence[Run], group: Sequence[Run]) -> int | None:
    end = group[-1].start + group[-1].length
    low, high = 0, len(runs)
    while low < high:
        middle = (low + high) // 2
        if runs[middle].start < end:
            low = middle + 1
        else:
            high = middle
    for run in runs[low : low + 4]:
        if run.offset is not None:
            return run.offset - run.start
    return None


def _shifts(group: Sequence[Run], before: int, after: int | None) -> list[int]:
    """Where the base may line up with the group: as before it, as after it, and as the copies inside it do."""
    inside = sorted((run for run in group if run.offset is not None), key=lambda run: -run.length)
    found = [before, *([after] if after is not None else [])]
    found += [run.offset - run.start for run in inside[:2] if run.offset is not None]
    return list(dict.fromkeys(found))


def _estimate_apart(
    group: Sequence[Run], old: Buffer, new: Buffer, before: int, after: int | None
) -> Iterator[_Segment]:
    for position, run in enumerate(group):
        if run.offset is not None:
            yield _Segment(run.start, [(Op(OpKind.COPY, run.length, run.offset), b"")])
            before = run.offset - run.start
            continue
        following = group[position + 1] if position + 1 < len(group) else None
        next_shift = following.offset - following.start if following and following.offset is not None else after
        yield from _estimate_gap(run, old, new, _shifts((), before, next_shift))


def _estimate_gap(gap: Run, old: Buffer, new: Buffer, shifts: Sequence[int]) -> Iterator[_Segment]:
    for start in range(gap.start, gap.start + gap.length, MAX_SEGMENT_BYTES):
        length = min(MAX_SEGMENT_BYTES, gap.start + gap.length - start)
        yield _Segment(start, _estimate(start, new[start : start + length], old, shifts))


def _estimate(start: int, data: bytes, old: Buffer, shifts: Sequence[int]) -> list[Candidate]:
    """Every way to make one segment with the quick compressor, the smallest first."""
    ways = {_data(data)}
    for shift in shifts:
        if len(old) >= MIN_WINDOW_BYTES:
            ways.add(_prefix(start, data, old, shift, _window_size(len(data)), _QUICK_LEVEL))
        if 0 <= start + shift <= len(old) - len(data):
            ways.add(_add(start, data, old, shift))
    return sorted(ways, key=lambda way: (len(way[1]), way[0].kind, way[0].offset))


@dataclass(frozen=True, slots=True)
class _Segment:
    """A segment and the ways to make it, estimated, the smallest first."""

    start: int
    ways: Sequence[Candidate]

    def smallest(self, old: Buffer, new: Buffer) -> Candidate:
        """The smallest way, after the slow compressor tried those that are worth it."""
        best = self.ways[0]
        if best[0].kind is OpKind.COPY or len(best[1]) > _HOPELESS * best[0].length:
            return best
        data = new[self.start : self.start + best[0].length]
        bound = len(best[1]) * _WORTH_TRYING + 64
        for op, payload in self.ways:
            if len(payload) <= bound:
                best = min(best, (op, payload), _again(op, data, old), key=_size)
        op = best[0]
        if op.kind is OpKind.PREFIX and len(best[1]) > _WIDE_FROM_BYTES and len(old) > op.window_bytes:
            shift = op.offset + op.window_bytes // 2 - self.start - op.length // 2
            best = min(best, _prefix(self.start, data, old, shift, MAX_WINDOW_BYTES, _WIDE_LEVEL), key=_size)
        return best


def _size(way: Candidate) -> int:
    return len(way[1])


def _window_size(length: int) -> int:
    return min(MAX_WINDOW_BYTES, max(_SMALL_WINDOW_BYTES, 4 * length))


def _data(data: bytes) -> Candidate:
    payload = zstd.compress(data, _QUICK_LEVEL)
    return Op(OpKind.DATA, len(data), payload_bytes=len(payload)), payload


def _prefix(start: int, data: bytes, old: Buffer, shift: int, size: int, level: int) -> Candidate:
    size = min(size, len(old))
    middle = start + shift + len(data) // 2
    offset = max(0, min(len(old) - size, middle - size // 2))
    payload = zstd.compress(data, level, old[offset : offset + size])
    return Op(OpKind.PREFIX, len(data), offset, size, len(payload)), payload


def _add(start: int, data: bytes, old: Buffer, shift: int) -> Candidate:
    offset = start + shift
    payload = zstd.compress(subtract_bytes(data, old[offset : offset + len(data)]), _QUICK_LEVEL)
    return Op(OpKind.ADD, len(data), offset, payload_bytes=len(payload)), payload


def _again(op: Op, data: bytes, old: Buffer) -> Candidate:
    """The same way with the slow compressor."""
    if op.kind is OpKind.ADD:
        difference = subtract_bytes(data, old[op.offset : op.offset + op.length])
        payload = zstd.compress_noise(difference)
        if len(payload) < _NOISE * len(data):
            payload = min(payload, zstd.compress(difference, _BEST_LEVEL), key=len)
    else:
        payload = zstd.compress(data, _BEST_LEVEL, old[op.offset : op.offset + op.window_bytes])
    return Op(op.kind, op.length, op.offset, op.window_bytes, len(payload)), payload


def subtract_bytes(left: bytes, right: bytes) -> bytes:
    """Bytewise difference modulo 256, all bytes at once: no subtraction borrows from its neighbour."""
    count = len(left)
    high = int.from_bytes(b"\x80" * count, "little")
    low = int.from_bytes(b"\x7f" * count, "little")
    x, y = int.from_bytes(left, "little"), int.from_bytes(right, "little")
    return (((x | high) - (y & low)) ^ ((x ^ y ^ high) & high)).to_bytes(count, "little")

"""Writes the smallest delta it can find between two files, within the format's bounds.

What stands in the base is copied (match.py); the rest is cut into segments that line up with it (segments.py), and of
each segment's ways the smallest is kept (ways.py). Files are mapped, not read; a few segments are worked on at a time,
one on each processor, and the delta's bytes do not depend on how many.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

from agent.delta.format import DeltaInfo, Op, OpKind, next_cursor, pack_header, pack_op, pack_trailer
from agent.delta.match import Buffer, find_runs
from agent.delta.output import whole_file
from agent.delta.segments import cut
from agent.delta.stream import file_sha256
from agent.delta.ways import Segment, Way

Progress = Callable[[int, int], None]

# The slow compressor holds some 90 MiB for each segment it works on.
_MAX_WORKERS = 4


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
            for way in _smallest(cut(find_runs(old, new), old, new), old, new, effort):
                writer.add(*way)
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


def _smallest(segments: Iterator[Segment], old: Buffer, new: Buffer, effort: Effort) -> Iterator[Way]:
    """Each segment's smallest way, in order. zstd lets go of the interpreter, so threads are enough."""
    if effort is Effort.QUICK:
        for segment in segments:
            yield segment.ways[0]
        return
    workers = min(_MAX_WORKERS, os.cpu_count() or 1)
    waiting: deque[Future[Way]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for segment in segments:
            waiting.append(pool.submit(segment.smallest, old, new))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

"""Writes the smallest delta it can find between two files, within the format's bounds.

What stands in the base is copied (match.py); the rest is cut into segments that line up with it (segments.py), and of
each segment's ways the smallest is kept (ways.py). A delta that may be larger than the full transfer gives way to one
that uses nothing of its base. A few segments are worked on at a time, one on each processor, and the delta's bytes do
not depend on how many. What the decoder makes of each operation is hashed as it is written: a delta that would not
make its result, since a file changed meanwhile, never gets its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO

from agent.contract.errors import ErrorCode, OperationError
from agent.delta.apply import decode
from agent.delta.format import DeltaInfo, Op, OpKind, next_cursor, pack_header, pack_op, pack_trailer
from agent.delta.match import Buffer, Run, find_runs
from agent.delta.output import whole_file
from agent.delta.segments import cut
from agent.delta.source import Source, opened
from agent.delta.ways import Segment, Way, quick_bytes

Progress = Callable[[int, int], None]

# The slow compressor holds some 90 MiB for each segment it works on.
_MAX_WORKERS = 4
_RESULT = ErrorCode.DELTA_WRONG_RESULT


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
    with whole_file(out, base, result) as part, _opened(base) as old, opened(result, _RESULT) as new:
        info = DeltaInfo(old.sha256 if isinstance(old, Source) else None, len(old), new.sha256, len(new))
        job = _Job(info, new, effort, progress)
        with part.open("w+b") as file:
            job.write(file, find_runs(old, new), old)
            if base is not None and 2 * file.tell() > quick_bytes(new):
                with tempfile.TemporaryFile(dir=out.parent) as alone:
                    job.write(alone, [Run(0, len(new), None)], b"")
                    if alone.tell() < file.tell():
                        _replace(file, alone)
    return info


def _opened(base: Path | None) -> AbstractContextManager[Source | bytes]:
    return contextlib.nullcontext(b"") if base is None else opened(base, ErrorCode.DELTA_WRONG_BASE)


def _replace(file: IO[bytes], better: IO[bytes]) -> None:
    file.seek(0)
    file.truncate()
    better.seek(0)
    shutil.copyfileobj(better, file)


@dataclass(frozen=True, slots=True)
class _Job:
    info: DeltaInfo
    new: Source
    effort: Effort
    progress: Progress | None

    def write(self, file: IO[bytes], runs: Sequence[Run], old: Buffer) -> None:
        """A whole delta out of these runs."""
        writer = _Writer(file, self.info, old, self.progress)
        for way in _smallest(cut(runs, old, self.new), old, self.new, self.effort):
            writer.add(*way)
        writer.finish()


class _Writer:
    def __init__(self, file: IO[bytes], info: DeltaInfo, old: Buffer, progress: Progress | None) -> None:
        self._file = file
        self._info = info
        self._old = old
        self._progress = progress
        self._cursor = 0
        self._produced = 0
        self._crc = 0
        self._digest = hashlib.sha256()
        self._write(pack_header(info))

    def add(self, op: Op, payload: bytes) -> None:
        self._write(pack_op(op, self._cursor))
        self._write(payload)
        for piece in decode(op, payload, lambda offset, count: self._old[offset : offset + count]):
            self._digest.update(piece)
        self._cursor = next_cursor(op, self._cursor)
        self._produced += op.length
        if self._progress:
            self._progress(self._produced, self._info.result_size_bytes)

    def finish(self) -> None:
        if self._digest.hexdigest() != self._info.result_sha256:
            raise OperationError(
                _RESULT,
                "cannot make the delta: it would make another file than it was made for",
                "Make it again when nobody writes to those files.",
            )
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
        try:
            for segment in segments:
                waiting.append(pool.submit(segment.smallest, old, new))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # whoever ends it early waits for no more than has begun

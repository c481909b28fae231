"""Builds a file out of a base and a delta that arrives in pieces, in bounded memory, strictly in order.

A delta is refused with `delta-invalid`, `delta-wrong-base` or `delta-wrong-result`, and the part file is then gone:
nothing half built stays behind. When the bytes stop arriving, or the process dies, the part file stays and the last
checkpoint says how far it is good. Resuming reads the part back and compares its hash with the checkpoint's before it
goes on. The result is complete only when its hash and its size are those of the header, and the CRC of the delta's own
bytes agrees.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from agent.contract.errors import ErrorCode, OperationError
from agent.delta import zstd
from agent.delta.format import (
    HEADER_BYTES,
    REFUSED,
    DeltaInfo,
    Op,
    OpKind,
    invalid,
    next_cursor,
    parse_header,
    read_op,
)
from agent.delta.stream import PIECE_BYTES, Reader, file_sha256

Progress = Callable[[int, int], None]
ReadBase = Callable[[int, int], bytes]  # the base's bytes at an offset, exactly so many

_ADD_BYTES = 64 * 1024
# A checkpoint costs one small file; this often is enough to lose little and write little.
CHECKPOINT_BYTES = 1 << 20
# What says that this delta makes nothing of this base, whoever asks again.
FAULTS = frozenset(
    {
        ErrorCode.DELTA_INVALID,
        ErrorCode.DELTA_WRONG_BASE,
        ErrorCode.DELTA_WRONG_RESULT,
        ErrorCode.NEWER_SCHEMA,
    }
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How far an apply came: everything needed to go on at a boundary between two operations."""

    info: DeltaInfo
    delta_offset: int
    produced: int
    cursor: int
    crc: int
    part_sha256: str


def apply_delta(
    base: Path | None,
    chunks: Iterable[bytes],
    part: Path,
    *,
    base_sha256: str | None = None,
    resume: Checkpoint | None = None,
    on_checkpoint: Callable[[Checkpoint], None] | None = None,
    progress: Progress | None = None,
) -> DeltaInfo:
    """Build `part` from `base` and the delta's bytes. With `resume`, `chunks` begin at its `delta_offset`.

    `base_sha256` is the hash of `base` when the caller has just computed it; otherwise it is computed here. Errors
    raised by `chunks` pass through and leave the part for a later resume.
    """
    reader = Reader(chunks, offset=resume.delta_offset, crc=resume.crc) if resume else Reader(chunks)
    try:
        info = resume.info if resume else parse_header(reader.take(HEADER_BYTES))
        with _open_base(base, info, base_sha256) as read_base, _open_part(part, resume) as new:
            output = _Output(new, info, progress)
            cursor = output.restore(resume) if resume else 0
            _run(reader, read_base, output, cursor, on_checkpoint)
            new.flush()
            os.fsync(new.fileno())
    except OperationError as error:
        if error.code in FAULTS:
            part.unlink(missing_ok=True)
        raise
    return info


def _run(
    reader: Reader,
    read_base: ReadBase,
    output: _Output,
    cursor: int,
    on_checkpoint: Callable[[Checkpoint], None] | None,
) -> None:
    mark = output.produced
    while True:
        op = read_op(reader.take, output.info, cursor, output.produced)
        if op.kind is OpKind.END:
            break
        for piece in decode(op, reader.take(op.payload_bytes), read_base):
            output.write(piece)
        cursor = next_cursor(op, cursor)
        if on_checkpoint and output.produced - mark >= CHECKPOINT_BYTES:
            mark = output.produced
            output.flush()
            on_checkpoint(
                Checkpoint(output.info, reader.offset, mark, cursor, reader.crc, output.digest.copy().hexdigest())
            )
    reader.finish()
    if output.digest.hexdigest() != output.info.result_sha256:
        raise OperationError(
            ErrorCode.DELTA_WRONG_RESULT,
            f"{REFUSED}: the result's hash is not the one the header promises",
        )


def decode(op: Op, payload: bytes, read_base: ReadBase) -> Iterator[bytes]:
    """What an operation makes, in pieces. Raises `delta-invalid`."""
    if op.kind is OpKind.COPY:
        for at in range(op.offset, op.offset + op.length, PIECE_BYTES):
            yield read_base(at, min(PIECE_BYTES, op.offset + op.length - at))
        return
    window = read_base(op.offset, op.window_bytes) if op.kind is OpKind.PREFIX else b""
    try:
        data = zstd.decompress(payload, op.length, window)
    except zstd.ZstdError as cause:
        raise invalid(f"a segment does not decompress: {cause}") from cause
    if op.kind is OpKind.ADD:
        for start in range(0, op.length, _ADD_BYTES):
            piece = data[start : start + _ADD_BYTES]
            yield add_bytes(piece, read_base(op.offset + start, len(piece)))
        return
    yield data


_LOW = {_ADD_BYTES: int.from_bytes(b"\x7f" * _ADD_BYTES, "little")}
_HIGH = {_ADD_BYTES: int.from_bytes(b"\x80" * _ADD_BYTES, "little")}


def add_bytes(left: bytes, right: bytes) -> bytes:
    """Bytewise sum modulo 256, all bytes at once: each addition is kept from carrying into its neighbour."""
    count = len(left)
    low = _LOW.get(count) or int.from_bytes(b"\x7f" * count, "little")
    high = _HIGH.get(count) or int.from_bytes(b"\x80" * count, "little")
    x, y = int.from_bytes(left, "little"), int.from_bytes(right, "little")
    return (((x & low) + (y & low)) ^ ((x ^ y) & high)).to_bytes(count, "little")


@contextlib.contextmanager
def _open_base(base: Path | None, info: DeltaInfo, known_sha256: str | None) -> Iterator[ReadBase]:
    if info.base_sha256 is None:
        yield _no_base
        return
    remedy = "Take the full transfer instead."
    if base is None:
        raise OperationError(
            ErrorCode.DELTA_WRONG_BASE, f"{REFUSED}: it needs a base of sha256 {info.base_sha256}", remedy
        )
    actual = known_sha256 or file_sha256(base)
    if actual != info.base_sha256 or base.stat().st_size != info.base_size_bytes:
        raise OperationError(
            ErrorCode.DELTA_WRONG_BASE,
            f"{REFUSED}: its base has sha256 {info.base_sha256}, {base.name} has {actual}",
            remedy,
            {"wanted": info.base_sha256, "found": actual},
        )
    with base.open("rb", buffering=0) as old:
        yield functools.partial(_read_exactly, old)


def _read_exactly(old: FileIO, offset: int, count: int) -> bytes:
    try:
        data = os.pread(old.fileno(), count, offset)
    except OSError as cause:  # whoever has another way to the result takes it
        raise OperationError(
            ErrorCode.DELTA_WRONG_BASE, f"{REFUSED}: its base does not read: {cause.strerror}"
        ) from cause
    if len(data) != count:
        raise OperationError(ErrorCode.DELTA_WRONG_BASE, f"{REFUSED}: the base became shorter meanwhile")
    return data


def _no_base(offset: int, count: int) -> bytes:
    raise AssertionError("read_op admits nothing that reads from no base")


@contextlib.contextmanager
def _open_part(part: Path, resume: Checkpoint | None) -> Iterator[BinaryIO]:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(part, flags if resume else flags | os.O_TRUNC, 0o644)
    with os.fdopen(descriptor, "r+b") as new:
        yield new


@dataclass(slots=True)
class _Output:
    """The part file: hashed as it grows."""

    file: BinaryIO
    info: DeltaInfo
    progress: Progress | None
    produced: int = 0
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def restore(self, resume: Checkpoint) -> int:
        left = resume.produced
        while left and (piece := self.file.read(min(left, PIECE_BYTES))):
            self.digest.update(piece)
            left -= len(piece)
        if left or self.digest.copy().hexdigest() != resume.part_sha256:
            raise invalid("the part file is not what its checkpoint says")
        self.file.truncate(resume.produced)
        self.file.seek(resume.produced)
        self.produced = resume.produced
        return resume.cursor

    def write(self, piece: bytes) -> None:
        self.file.write(piece)
        self.digest.update(piece)
        self.produced += len(piece)
        if self.progress:
            self.progress(self.produced, self.info.result_size_bytes)

    def flush(self) -> None:
        self.file.flush()
        os.fdatasync(self.file.fileno())

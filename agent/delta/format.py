"""The delta format, version 1: how a recipe that builds one file out of another is laid out in bytes.

Pure: bytes in, values out. `docs/formats.md` describes every byte. The output is written strictly in order, every
segment and window is bounded in the header, and the decoder refuses headers that ask for more than its own limits,
so that memory is bounded whatever the size of the files. A full transfer is the same format without a base.
Whatever cannot be read exactly is refused with `delta-invalid`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from agent.contract.errors import ErrorCode, OperationError

MAGIC = b"AVODELTA"
FORMAT = 1
# What the encoder writes, and the most that the decoder agrees to hold at once.
MAX_SEGMENT_BYTES = 1 << 20
MAX_WINDOW_BYTES = 4 << 20
MIN_WINDOW_BYTES = 8  # zstd takes nothing shorter as a dictionary
MAX_FILE_BYTES = 1 << 40

_HEADER = struct.Struct("<8sHHIIIQ32sQ32s")
HEADER_BYTES = _HEADER.size
_TRAILER = struct.Struct("<I")
TRAILER_BYTES = _TRAILER.size
_HAS_BASE = 1
_VARINT_BYTES = 9
# How every message about a delta that is refused begins.
REFUSED = "cannot apply the delta"


class OpKind(IntEnum):
    """The first byte of an operation."""

    END = 0
    COPY = 1
    DATA = 2
    PREFIX = 3
    ADD = 4


@dataclass(frozen=True, slots=True)
class DeltaInfo:
    """The header: what the delta is made from, what it makes, and the memory it asks for."""

    base_sha256: str | None
    base_size_bytes: int
    result_sha256: str
    result_size_bytes: int
    segment_bytes: int = MAX_SEGMENT_BYTES
    window_bytes: int = MAX_WINDOW_BYTES
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. `offset` and `window_bytes` speak of the base; `payload_bytes` follow it in the file."""

    kind: OpKind
    length: int
    offset: int = 0
    window_bytes: int = 0
    payload_bytes: int = 0


def invalid(why: str) -> OperationError:
    """The error for a delta that is not what this format allows."""
    return OperationError(ErrorCode.DELTA_INVALID, f"{REFUSED}: {why}")


def payload_limit(length: int) -> int:
    """The most payload bytes that an operation making `length` bytes may carry: what incompressible data needs."""
    return length + length // 128 + 512


def pack_header(info: DeltaInfo) -> bytes:
    """The fixed-size header."""
    return _HEADER.pack(
        MAGIC,
        info.format,
        _HAS_BASE if info.base_sha256 is not None else 0,
        info.segment_bytes,
        info.window_bytes,
        0,
        info.base_size_bytes,
        bytes.fromhex(info.base_sha256 or "00" * 32),
        info.result_size_bytes,
        bytes.fromhex(info.result_sha256),
    )


def parse_header(data: bytes) -> DeltaInfo:
    """The inverse of `pack_header`; refuses another format, unknown flags and bounds above this decoder's."""
    magic, version, flags, segment, window, reserved, base_size, base_hash, result_size, result_hash = _HEADER.unpack(
        data
    )
    if magic != MAGIC:
        raise invalid("it does not begin as a delta does")
    if version != FORMAT:
        raise OperationError(
            ErrorCode.NEWER_SCHEMA,
            f"{REFUSED}: format {version}, this agent reads format {FORMAT}",
            "Update the avocado-agent extension first.",
        )
    if flags & ~_HAS_BASE or reserved:
        raise invalid("its header has unknown flags")
    if not 1 <= segment <= MAX_SEGMENT_BYTES or not MIN_WINDOW_BYTES <= window <= MAX_WINDOW_BYTES:
        raise invalid(f"it asks for segments of {segment} and windows of {window} bytes")
    if base_size > MAX_FILE_BYTES or result_size > MAX_FILE_BYTES:
        raise invalid("its header names impossible sizes")
    has_base = bool(flags & _HAS_BASE)
    if not has_base and (base_size or any(base_hash)):
        raise invalid("it names a base and says it has none")
    return DeltaInfo(
        base_hash.hex() if has_base else None, base_size, result_hash.hex(), result_size, segment, window, version
    )


def pack_trailer(crc: int) -> bytes:
    """What follows the END operation: CRC-32 of every byte before it."""
    return _TRAILER.pack(crc)


def parse_trailer(data: bytes) -> int:
    """The inverse of `pack_trailer`."""
    value: int = _TRAILER.unpack(data)[0]
    return value


def pack_op(op: Op, cursor: int) -> bytes:
    """The bytes of an operation before its payload. `cursor`: see `next_cursor`."""
    head = bytes((op.kind,))
    match op.kind:
        case OpKind.END:
            return head
        case OpKind.COPY:
            return head + _varint(op.length) + _signed(op.offset - cursor)
        case OpKind.DATA:
            return head + _varint(op.length) + _varint(op.payload_bytes)
        case OpKind.PREFIX:
            window = _signed(op.offset - cursor) + _varint(op.window_bytes)
            return head + _varint(op.length) + window + _varint(op.payload_bytes)
        case OpKind.ADD:
            return head + _varint(op.length) + _signed(op.offset - cursor) + _varint(op.payload_bytes)


def read_op(take: Callable[[int], bytes], info: DeltaInfo, cursor: int, produced: int) -> Op:
    """Read one operation and refuse it unless everything it names exists. `take(n)` returns the next n bytes."""
    number = take(1)[0]
    if number > max(OpKind):
        raise invalid(f"unknown operation {number}")
    kind = OpKind(number)
    if kind is OpKind.END:
        if produced != info.result_size_bytes:
            raise invalid(f"it ends after {produced} of {info.result_size_bytes} bytes")
        return Op(kind, 0)
    length = _read_varint(take)
    offset = window = payload = 0
    if kind is not OpKind.DATA:
        offset = cursor + _read_signed(take)
    if kind is OpKind.PREFIX:
        window = _read_varint(take)
    if kind is not OpKind.COPY:
        payload = _read_varint(take)
    op = Op(kind, length, offset, window, payload)
    _check(op, info, produced)
    return op


def _check(op: Op, info: DeltaInfo, produced: int) -> None:
    if not 1 <= op.length <= info.result_size_bytes - produced:
        raise invalid(f"an operation makes {op.length} bytes where {info.result_size_bytes - produced} are left")
    if op.kind is not OpKind.COPY and op.length > info.segment_bytes:
        raise invalid(f"a segment of {op.length} bytes, bound {info.segment_bytes}")
    if op.kind is OpKind.PREFIX and not MIN_WINDOW_BYTES <= op.window_bytes <= info.window_bytes:
        raise invalid(f"a window of {op.window_bytes} bytes, bound {info.window_bytes}")
    if op.payload_bytes > payload_limit(op.length):
        raise invalid(f"a payload of {op.payload_bytes} bytes for {op.length}")
    reach = {OpKind.DATA: 0, OpKind.PREFIX: op.window_bytes}.get(op.kind, op.length)
    if op.offset < 0 or op.offset + reach > info.base_size_bytes:
        raise invalid(f"it reads bytes {op.offset} to {op.offset + reach} of a base of {info.base_size_bytes}")


def next_cursor(op: Op, cursor: int) -> int:
    """Where the base lines up with the output after `op`; the next operation's offset is relative to it."""
    if op.kind in (OpKind.COPY, OpKind.ADD):
        return op.offset + op.length
    return cursor + op.length


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _signed(value: int) -> bytes:
    return _varint(value << 1 if value >= 0 else (-value << 1) - 1)


def _read_varint(take: Callable[[int], bytes]) -> int:
    value = 0
    for index in range(_VARINT_BYTES):
        byte = take(1)[0]
        value |= (byte & 0x7F) << (7 * index)
        if not byte & 0x80:
            if index and not byte:
                raise invalid("a number is written longer than it needs")
            return value
    raise invalid("a number is too large")


def _read_signed(take: Callable[[int], bytes]) -> int:
    value = _read_varint(take)
    return -((value + 1) >> 1) if value & 1 else value >> 1

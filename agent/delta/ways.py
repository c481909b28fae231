"""The ways to make one segment: out of nothing, against a window of the base, or as the difference from the base.

The difference is small where numbers moved a little, as retrained weights do. The quick compressor estimates every
way; the slow one tries those that come near the smallest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent.delta import zstd
from agent.delta.format import MAX_SEGMENT_BYTES, MAX_WINDOW_BYTES, MIN_WINDOW_BYTES, Op, OpKind
from agent.delta.match import Buffer

Way = tuple[Op, bytes]

_QUICK_LEVEL = 3
_BEST_LEVEL = 19
_SMALL_WINDOW_BYTES = 64 * 1024
# How much worse than the best an estimate may be and still be tried with the slow compressor.
_WORTH_TRYING = 1.1
# Where a segment stays large, a window of this format's full size is tried, which takes long to search.
_WIDE_FROM_BYTES = 2048
_WIDE_LEVEL = 12
# A difference that stays above this share of its length is noise: a long search finds nothing more in it.
_NOISE = 0.2
# What the quick compressor leaves above this share of its length, the slow one does not make smaller either.
_HOPELESS = 0.98


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment and the ways to make it, estimated, the smallest first."""

    start: int
    ways: Sequence[Way]

    def smallest(self, old: Buffer, new: Buffer) -> Way:
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


def copied(start: int, length: int, offset: int) -> Segment:
    """A stretch that the base holds at `offset`."""
    return Segment(start, [(Op(OpKind.COPY, length, offset), b"")])


def estimated(start: int, data: bytes, old: Buffer, shifts: Sequence[int]) -> Segment:
    """Every way to make one segment with the quick compressor, the smallest first."""
    ways = {_data(data)}
    for shift in shifts:
        if len(old) >= MIN_WINDOW_BYTES:
            ways.add(_prefix(start, data, old, shift, _window_size(len(data)), _QUICK_LEVEL))
        if 0 <= start + shift <= len(old) - len(data):
            ways.add(_add(start, data, old, shift))
    return Segment(start, sorted(ways, key=lambda way: (len(way[1]), way[0].kind, way[0].offset)))


def quick_bytes(new: Buffer) -> int:
    """What the quick compressor leaves of a whole file."""
    pieces = (new[at : at + MAX_SEGMENT_BYTES] for at in range(0, len(new), MAX_SEGMENT_BYTES))
    return sum(len(_data(piece)[1]) for piece in pieces)


def _size(way: Way) -> int:
    return len(way[1])


def _window_size(length: int) -> int:
    return min(MAX_WINDOW_BYTES, max(_SMALL_WINDOW_BYTES, 4 * length))


def _data(data: bytes) -> Way:
    payload = zstd.compress(data, _QUICK_LEVEL)
    return Op(OpKind.DATA, len(data), payload_bytes=len(payload)), payload


def _prefix(start: int, data: bytes, old: Buffer, shift: int, size: int, level: int) -> Way:
    size = min(size, len(old))
    middle = start + shift + len(data) // 2
    offset = max(0, min(len(old) - size, middle - size // 2))
    payload = zstd.compress(data, level, old[offset : offset + size])
    return Op(OpKind.PREFIX, len(data), offset, size, len(payload)), payload


def _add(start: int, data: bytes, old: Buffer, shift: int) -> Way:
    offset = start + shift
    payload = zstd.compress(subtract_bytes(data, old[offset : offset + len(data)]), _QUICK_LEVEL)
    return Op(OpKind.ADD, len(data), offset, payload_bytes=len(payload)), payload


def _again(op: Op, data: bytes, old: Buffer) -> Way:
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

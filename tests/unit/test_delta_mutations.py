"""Deltas made wrong on purpose, field by field and at random: a named error, no file, bounded memory.

The checksum is made right again after each mutation, so that every other check has to stand by itself.
"""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.contract.errors import OperationError
from agent.delta import zstd
from agent.delta.apply import FAULTS, apply_delta
from agent.delta.format import (
    HEADER_BYTES,
    TRAILER_BYTES,
    DeltaInfo,
    Op,
    OpKind,
    next_cursor,
    pack_header,
    pack_op,
    pack_trailer,
    parse_header,
    read_op,
)
from agent.delta.stream import Reader, file_sha256

MEMORY_BYTES = 12 << 20
some = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mutations") / "base"
    path.write_bytes(bytes(range(256)) * 80 + b"the quick brown fox\n" * 500)
    return path


@pytest.fixture(scope="module")
def parts(base: Path) -> list[tuple[Op, bytes]]:
    """One operation of each kind, written by hand so that each is there."""
    old = base.read_bytes()
    text, fox = zstd.compress(b"nothing of it stands there\n" * 9, 3), b"the quick brown fax\n" * 9
    window = zstd.compress(fox, 3, old[20480:21000])
    ones = zstd.compress(b"\1" * 300, 3)
    return [
        (Op(OpKind.COPY, 1000, 40), b""),
        (Op(OpKind.DATA, 27 * 9, payload_bytes=len(text)), text),
        (Op(OpKind.PREFIX, len(fox), 20480, 520, len(window)), window),
        (Op(OpKind.ADD, 300, 2000, payload_bytes=len(ones)), ones),
        (Op(OpKind.COPY, 20, 20480), b""),
    ]


def written(base: Path, parts: list[tuple[Op, bytes]], *, result: bytes = b"", cursors: bool = True) -> bytes:
    size = sum(op.length for op, _ in parts)
    digest = zlib.crc32(result)  # any hash: what is tried here never gets as far as the right one
    body = pack_header(DeltaInfo(file_sha256(base), base.stat().st_size, f"{digest:064x}", size))
    cursor = 0
    for op, payload in parts:
        body += pack_op(op, cursor if cursors else 0) + payload
        cursor = next_cursor(op, cursor)
    return sealed(body + pack_op(Op(OpKind.END, 0), cursor))


def sealed(body: bytes) -> bytes:
    return body + pack_trailer(zlib.crc32(body))


def refusal(base: Path, delta: bytes, out: Path) -> OperationError:
    """The error; the output is gone, and no more memory was held than the format promises."""
    tracemalloc.start()
    try:
        with pytest.raises(OperationError) as refused:
            apply_delta(base, pieces(delta), out)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused.value.code in FAULTS
    assert not out.exists(), "a refused delta left a file behind"
    assert peak < MEMORY_BYTES
    return refused.value


def pieces(delta: bytes) -> Iterator[bytes]:
    for at in range(0, len(delta), 777):
        yield delta[at : at + 777]


def test_the_operations_are_right_up_to_the_hash(tmp_path: Path, base: Path, parts: list[tuple[Op, bytes]]) -> None:
    error = refusal(base, written(base, parts), tmp_path / "out")
    assert error.message == "cannot apply the delta: the result's hash is not the one the header promises"


@some
@given(order=st.permutations(range(5)))
def test_operations_in_another_order_never_make_the_promised_file(
    tmp_path: Path, base: Path, parts: list[tuple[Op, bytes]], order: list[int]
) -> None:
    refusal(base, written(base, [parts[index] for index in order]), tmp_path / "out")


@some
@given(data=st.data())
def test_flipped_bits_under_a_right_checksum_are_refused(
    tmp_path: Path, base: Path, parts: list[tuple[Op, bytes]], data: st.DataObject
) -> None:
    body = bytearray(written(base, parts)[:-TRAILER_BYTES])
    for bit in data.draw(st.lists(st.integers(0, len(body) * 8 - 1), min_size=1, max_size=4)):
        body[bit // 8] ^= 1 << bit % 8
    refusal(base, sealed(bytes(body)), tmp_path / "out")


@some
@given(data=st.data())
def test_stretches_cut_out_doubled_or_replaced_are_refused(
    tmp_path: Path, base: Path, parts: list[tuple[Op, bytes]], data: st.DataObject
) -> None:
    body = written(base, parts)[:-TRAILER_BYTES]
    first = data.draw(st.integers(0, len(body) - 1))
    last = data.draw(st.integers(first, len(body)))
    inserted = data.draw(st.one_of(st.just(b""), st.just(body[first:last] * 2), st.binary(max_size=40)))
    refusal(base, sealed(body[:first] + inserted + body[last:]), tmp_path / "out")


@some
@given(tail=st.binary(max_size=400))
def test_any_bytes_after_a_right_header_are_refused(tmp_path: Path, base: Path, tail: bytes) -> None:
    header = pack_header(DeltaInfo(file_sha256(base), base.stat().st_size, "0" * 64, 1 << 30))
    refusal(base, sealed(header + tail), tmp_path / "out")


def overlong(value: int) -> bytes:
    """The number with one byte more than it needs."""
    return bytes((value & 0x7F | 0x80, value >> 7 | 0x80, 0))


HUGE = b"\xff" * 8 + b"\x7f"


@pytest.mark.parametrize(
    ("after_header", "why"),
    [
        (b"\5", "unknown operation 5"),
        (b"\1" + overlong(1000) + b"\0", "a number is written longer than it needs"),
        (b"\1" + b"\xff" * 9, "a number is too large"),
        (b"\1" + HUGE + b"\0", f"an operation makes {2**63 - 1} bytes where 100000 are left"),
        (b"\1\x0a" + HUGE, f"it reads bytes {-(2**62)} to {-(2**62) + 10} of a base of 30480"),
        (b"\1\x0a" + b"\1", "it reads bytes -1 to 9 of a base of 30480"),
        (b"\1\x0a\xfe" + HUGE[1:], f"it reads bytes {2**62 - 1} to {2**62 + 9} of a base of 30480"),
        (b"\2\x0a" + HUGE, f"a payload of {2**63 - 1} bytes for 10"),
        (b"\3\x0a\0" + HUGE + b"\x0a", f"a window of {2**63 - 1} bytes, bound 4194304"),
        (b"\3\x0a\0\7\x0a", "a window of 7 bytes, bound 4194304"),
        (b"\4\x0a" + b"\xa0\xdc\3" + b"\0", "it reads bytes 30480 to 30490 of a base of 30480"),
        (b"\4\x0a\0\0", "a segment does not decompress: "),
        (b"\2\0\0", "an operation makes 0 bytes where 100000 are left"),
        (b"\0", "it ends after 0 of 100000 bytes"),
    ],
)
def test_a_number_that_lies_is_named(tmp_path: Path, base: Path, after_header: bytes, why: str) -> None:
    header = pack_header(DeltaInfo(file_sha256(base), base.stat().st_size, "0" * 64, 100_000))
    error = refusal(base, sealed(header + after_header), tmp_path / "out")
    assert error.message.startswith(f"cannot apply the delta: {why}")


@pytest.mark.parametrize("window_log", [10, 24, 27, 31])
def test_a_frame_that_names_no_length_is_refused_since_libzstd_would_set_its_window_aside(
    tmp_path: Path, base: Path, window_log: int
) -> None:
    # Magic, a frame header with a window descriptor and no content size, then a raw block of one byte.
    frame = struct.pack("<IBB", 0xFD2FB528, 0, (window_log - 10) << 3) + b"\x09\0\0x"
    error = refusal(base, written(base, [(Op(OpKind.DATA, 1, payload_bytes=len(frame)), frame)]), tmp_path / "out")
    assert error.message == "cannot apply the delta: a segment does not decompress: a frame of 1 bytes names no length"


BOMBS: dict[str, Callable[[int], bytes]] = {
    "zeros": lambda length: zstd.compress(bytes(length), 1),
    "two frames": lambda length: zstd.compress(b"x" * (length // 2), 3) + zstd.compress(b"x" * (length // 2), 3),
    "an empty frame": lambda length: zstd.compress(b"", 3),
    "a skippable frame": lambda length: struct.pack("<II", 0x184D2A50, 100) + bytes(100),
    "a frame and more": lambda length: zstd.compress(bytes(length), 3) + b"!",
    "a frame cut short": lambda length: zstd.compress(bytes(range(256)) * (length // 256), 3)[:-1],
}


@pytest.mark.parametrize("kind", BOMBS)
@pytest.mark.parametrize("claimed", [1000, 1 << 20])
def test_a_payload_of_another_length_than_it_claims_is_refused(
    tmp_path: Path, base: Path, kind: str, claimed: int
) -> None:
    payload = BOMBS[kind](claimed * 32 if kind == "zeros" else claimed)
    for op in (
        Op(OpKind.DATA, claimed, payload_bytes=len(payload)),
        Op(OpKind.ADD, min(claimed, 30_000), 0, payload_bytes=len(payload)),
        Op(OpKind.PREFIX, claimed, 0, 30_000, len(payload)),
    ):
        refusal(base, written(base, [(op, payload)]), tmp_path / "out")


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (10, b"\2\0", "its header has unknown flags"),
        (20, b"\1\0\0\0", "its header has unknown flags"),
        (12, b"\0\0\0\0", "it asks for segments of 0 and windows of 4194304 bytes"),
        (16, b"\0\0\0\x7f", "it asks for segments of 1048576 and windows of 2130706432 bytes"),
        (24, b"\xff" * 8, "its header names impossible sizes"),
        (64, b"\xff" * 8, "its header names impossible sizes"),
        (10, b"\0\0", "it names a base and says it has none"),
    ],
)
def test_a_header_that_lies_is_refused(
    tmp_path: Path, base: Path, parts: list[tuple[Op, bytes]], at: int, value: bytes, why: str
) -> None:
    body = bytearray(written(base, parts)[:-TRAILER_BYTES])
    body[at : at + len(value)] = value
    assert refusal(base, sealed(bytes(body)), tmp_path / "out").message == f"cannot apply the delta: {why}"


@given(data=st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_a_header_that_is_read_is_written_back_the_same(data: bytes) -> None:
    try:
        info = parse_header(b"AVODELTA\1\0" + data[10:])
    except OperationError:
        return
    assert pack_header(info) == b"AVODELTA\1\0" + data[10:]


def test_operations_read_back_as_they_were_written(base: Path, parts: list[tuple[Op, bytes]]) -> None:
    info = DeltaInfo(file_sha256(base), base.stat().st_size, "0" * 64, 1 << 20)
    cursor = produced = 0
    for (op, _), _ in pairwise([*parts, parts[0]]):
        reader = Reader([pack_op(op, cursor)])
        assert read_op(reader.take, info, cursor, produced) == op
        cursor, produced = next_cursor(op, cursor), produced + op.length

"""A pair of any size, made quickly: a base and a delta from it that asks as much of a decoder as the format allows."""

from __future__ import annotations

import hashlib
import random
import zlib
from pathlib import Path

from agent.delta import zstd
from agent.delta.format import (
    MAX_SEGMENT_BYTES,
    MAX_WINDOW_BYTES,
    DeltaInfo,
    Op,
    OpKind,
    next_cursor,
    pack_header,
    pack_op,
    pack_trailer,
)
from agent.delta.stream import file_sha256

PLUS_SEVEN = bytes((byte + 7) % 256 for byte in range(256))


def write_pair(folder: Path, size: int) -> None:
    """A base, and a delta whose segments are as large as they may be, of every kind in turn."""
    noise = random.Random(1).randbytes(MAX_WINDOW_BYTES + MAX_SEGMENT_BYTES)
    with (folder / "old").open("wb") as old:
        for at in range(0, size, MAX_SEGMENT_BYTES):
            old.write(noise[at % MAX_WINDOW_BYTES : at % MAX_WINDOW_BYTES + MAX_SEGMENT_BYTES])
    sevens = zstd.compress(b"\7" * MAX_SEGMENT_BYTES, 1)
    other = random.Random(2).randbytes(MAX_SEGMENT_BYTES)
    data = zstd.compress(other, 1)
    digest, body, cursor = hashlib.sha256(), b"", 0
    base_sha256 = file_sha256(folder / "old")
    with (folder / "old").open("rb") as old, (folder / "body").open("wb") as out:
        for at in range(0, size, MAX_SEGMENT_BYTES):
            old.seek(at)
            piece = old.read(MAX_SEGMENT_BYTES)
            payload = b""
            match (at // MAX_SEGMENT_BYTES + 1) % 4:  # the costliest kind is in the smallest file as well
                case 0:
                    op = Op(OpKind.COPY, len(piece), at)
                case 1:
                    op, payload, piece = Op(OpKind.DATA, MAX_SEGMENT_BYTES, payload_bytes=len(data)), data, other
                case 2:
                    op, payload = Op(OpKind.ADD, len(piece), at, payload_bytes=len(sevens)), sevens
                    piece = piece.translate(PLUS_SEVEN)
                case _:
                    start = max(0, min(at, size - MAX_WINDOW_BYTES))
                    old.seek(start)
                    window = old.read(min(MAX_WINDOW_BYTES, size))
                    piece = piece[::-1]
                    payload = zstd.compress(piece, 1, window)
                    op = Op(OpKind.PREFIX, MAX_SEGMENT_BYTES, start, len(window), len(payload))
            digest.update(piece)
            out.write(pack_op(op, cursor) + payload)
            cursor = next_cursor(op, cursor)
        out.write(pack_op(Op(OpKind.END, 0), cursor))
    head = pack_header(DeltaInfo(base_sha256, size, digest.hexdigest(), size))
    crc = zlib.crc32(head)
    with (folder / "body").open("rb") as source, (folder / "delta").open("wb") as delta:
        delta.write(head)
        while body := source.read(MAX_SEGMENT_BYTES):
            crc = zlib.crc32(body, crc)
            delta.write(body)
        delta.write(pack_trailer(crc))
    (folder / "body").unlink()

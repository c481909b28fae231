"""Bytes one piece at a time: of a file, and of a delta as it arrives."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from agent.delta.format import invalid

PIECE_BYTES = 256 * 1024


def file_chunks(path: Path, offset: int = 0, *, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """The bytes of a file in pieces of one length, the last one excepted."""
    with path.open("rb") as source:
        source.seek(offset)
        while chunk := source.read(piece_bytes):
            yield chunk


def file_sha256(path: Path) -> str:
    """sha256 hex of a file's bytes."""
    digest = hashlib.sha256()
    for chunk in file_chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


class Reader:
    """The delta's bytes as they arrive: exact reads, their position and their running CRC.

    `offset` and `crc` are those of the bytes before, where reading goes on in the middle.
    """

    def __init__(self, chunks: Iterable[bytes], *, offset: int = 0, crc: int = 0) -> None:
        self._chunks = iter(chunks)
        self._held = b""
        self._at = 0
        self.offset = offset
        self.crc = crc

    def take(self, count: int) -> bytes:
        """Exactly the next `count` bytes. Raises `delta-invalid` when fewer are left."""
        pieces: list[bytes] = []
        wanted = count
        while wanted:
            if self._at == len(self._held):
                self._held, self._at = self._next(), 0
            piece = self._held[self._at : self._at + wanted]
            self._at += len(piece)
            wanted -= len(piece)
            pieces.append(piece)
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self.offset += count
        self.crc = zlib.crc32(data, self.crc)
        return data

    def _next(self) -> bytes:
        for chunk in self._chunks:
            if chunk:
                return chunk
        raise invalid("it is cut short")

    def at_end(self) -> bool:
        """Nothing follows."""
        return self._at == len(self._held) and not any(self._chunks)

"""Bytes one piece at a time: of a file, and of a delta as it arrives."""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from agent.contract.errors import ErrorCode, OperationError
from agent.delta.format import TRAILER_BYTES, invalid, parse_trailer

PIECE_BYTES = 256 * 1024


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """A failure to read says which file."""
    try:
        yield
    except OSError as cause:
        code = ErrorCode.NOT_PERMITTED if isinstance(cause, PermissionError) else ErrorCode.INTERNAL
        code = ErrorCode.NOT_FOUND if isinstance(cause, FileNotFoundError) else code
        raise OperationError(code, f"cannot read {path}: {cause.strerror}", "Check that file and its disk.") from cause


def file_chunks(path: Path, offset: int = 0, *, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
    """The bytes of a file in pieces of one length, the last one excepted."""
    with reading(path):
        source = path.open("rb")
    with source:
        source.seek(offset)
        while True:
            with reading(path):  # not around the yield: what its reader raises is its own
                chunk = source.read(piece_bytes)
            if not chunk:
                return
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

    def finish(self) -> None:
        """The trailer fits every byte before it, and nothing follows. Raises `delta-invalid`."""
        crc = self.crc
        if parse_trailer(self.take(TRAILER_BYTES)) != crc:
            raise invalid("its checksum does not match its bytes")
        if self._at != len(self._held) or any(self._chunks):
            raise invalid("bytes follow its end")

"""A file as the encoder reads it: any bytes of it, from one descriptor, and refused when they change meanwhile.

Read and not mapped: a mapped file that somebody cuts short kills whoever looks at it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from agent.contract.errors import ErrorCode, OperationError
from agent.delta.stream import PIECE_BYTES, reading

_FIND_BYTES = 1 << 20


class Source:
    """Indexed by slices and searched like `bytes`; every thread may read it."""

    def __init__(self, path: Path, descriptor: int, code: ErrorCode) -> None:
        self._path = path
        self._descriptor = descriptor
        self._code = code
        self._was = self._figures()
        self._size = self._was[0]
        self.sha256 = self._hash()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, where: slice) -> bytes:
        start, stop, _ = where.indices(self._size)
        return self.read(start, max(stop - start, 0))

    def read(self, offset: int, count: int) -> bytes:
        """Exactly these bytes."""
        pieces: list[bytes] = []
        while count:
            with reading(self._path):
                piece = os.pread(self._descriptor, count, offset)
            if not piece:
                raise self._changed()
            pieces.append(piece)
            offset += len(piece)
            count -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def find(self, wanted: bytes) -> int:
        """Where these bytes stand first, or -1."""
        held = bytearray(_FIND_BYTES + len(wanted))
        for start in range(0, self._size, _FIND_BYTES):
            with reading(self._path):
                count = os.preadv(self._descriptor, [held], start)
            found = held.find(wanted, 0, count)
            if found >= 0:
                return start + found
        return -1

    def check(self) -> None:
        """It is what it was at first."""
        if self._figures() != self._was:
            raise self._changed()

    def _figures(self) -> tuple[int, int]:
        figures = os.fstat(self._descriptor)
        return figures.st_size, figures.st_mtime_ns

    def _hash(self) -> str:
        digest = hashlib.sha256()
        at = 0
        with reading(self._path):
            while piece := os.pread(self._descriptor, PIECE_BYTES, at):
                digest.update(piece)
                at += len(piece)
        self.check()
        if at != self._size:  # as the files of /proc
            raise OperationError(
                ErrorCode.USAGE,
                f"cannot read {self._path}: its size is {self._size} bytes, and {at} were read",
                "Copy it first, and name the copy.",
            )
        return digest.hexdigest()

    def _changed(self) -> OperationError:
        return OperationError(
            self._code,
            f"cannot make the delta: {self._path} changed meanwhile",
            "Make it again when nobody writes to that file.",
        )


@contextlib.contextmanager
def opened(path: Path, code: ErrorCode) -> Iterator[Source]:
    """The file, hashed. Raises `code` when it changes before the block ends, whatever else the block raises."""
    with reading(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OperationError(ErrorCode.USAGE, f"cannot read {path}: it is not a file", "Name a file.")
        source = Source(path, descriptor, code)
        try:
            yield source
        finally:
            source.check()
    finally:
        os.close(descriptor)

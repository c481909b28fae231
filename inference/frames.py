"""Frames between processes: one sealed memfd, cut into slots.

The process that makes the frames maps it read-write and then seals it, so that every later mapping, in whatever
process, is read-only and the size is fixed: no worker can touch a picture that another one looks at, and none can
make the owner fault by truncating the file. There is no lock. A slot is used again once its frame is answered; a
worker that still reads it then makes an answer which is dropped by its sequence number.
"""

from __future__ import annotations

import fcntl
import mmap
import os

SIDE = 192
FRAME_BYTES = SIDE * SIDE * 3
SLOTS = 8
_SLOT_BYTES = -(-FRAME_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
_RING_BYTES = _SLOT_BYTES * SLOTS
_F_SEAL_FUTURE_WRITE = 0x10  # Python 3.11's fcntl does not name it


class FrameRing:
    """The slots, in the maker (`create`) or in a reader (`attach`)."""

    def __init__(self, fd: int, memory: mmap.mmap) -> None:
        self.fd = fd
        self._memory = memory

    @classmethod
    def create(cls) -> FrameRing:
        """A new ring that only this process can write."""
        fd = os.memfd_create("avocado-frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, _RING_BYTES)
        memory = mmap.mmap(fd, _RING_BYTES)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        return cls(fd, memory)

    @classmethod
    def attach(cls, fd: int) -> FrameRing:
        """The ring behind an inherited descriptor, read-only."""
        return cls(fd, mmap.mmap(fd, _RING_BYTES, prot=mmap.PROT_READ))

    def write(self, slot: int, frame: bytes | memoryview) -> None:
        """Copy a frame of exactly FRAME_BYTES into a slot."""
        if len(frame) != FRAME_BYTES:
            raise ValueError(f"a frame has {FRAME_BYTES} bytes, not {len(frame)}")
        start = slot * _SLOT_BYTES
        self._memory[start : start + FRAME_BYTES] = frame

    def view(self, slot: int) -> memoryview:
        """The slot's bytes, without a copy."""
        start = slot * _SLOT_BYTES
        return memoryview(self._memory)[start : start + FRAME_BYTES]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._memory.closed

    def close(self) -> None:
        """Give the memory and the descriptor back."""
        self._memory.close()
        os.close(self.fd)

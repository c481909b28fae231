"""Turns a signed transfer into an image on disk: verified piece by piece, resumed where it stopped.

Each chunk of the transfer is hashed against its signed hash before the decoder sees a byte of it, and decoded into
the image's part file as it arrives; nothing else is stored. A connection that drops is tried again, after growing
pauses, while it makes progress; what first broke it is what is said. What was decoded is remembered beside the part, so
that another process, or the next boot, goes on from there. The part becomes an image only after its bytes were synced,
read back and hashed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from agent.contract.delta import Transfer
from agent.contract.disk import disk_error, disk_errors
from agent.contract.errors import ErrorCode, HostGoneError, OperationError
from agent.delta.apply import Checkpoint, apply_delta
from agent.delta.format import DeltaInfo
from agent.ports.protocols import Fetcher, Progress

SCHEMA = 1
# After these a dropped connection is tried again, without a new chunk in between: long enough for a server or a link to
# start anew, and half a minute in all.
PAUSES_S = (1.0, 5.0, 20.0)
_MAX_PROGRESS_BYTES = 16 * 1024
_AGAIN = (ErrorCode.FETCH_FAILED, ErrorCode.FETCH_TIMEOUT, ErrorCode.SERVER_UNAVAILABLE, ErrorCode.NOT_HTTP)


@dataclass(frozen=True, slots=True)
class Base:
    """An image whose bytes were just verified."""

    path: Path
    sha256: str


def run_transfer(fetcher: Fetcher, transfer: Transfer, base: Base | None, part: Path, progress: Progress) -> None:
    """Decode a transfer into `part`.

    Raises `hash-mismatch`, `entry-invalid`, `delta-*`, `fetch-*`, `disk-failed`, or `no-space` with the part gone.
    """
    try:
        _run(fetcher, transfer, base, part, progress)
    except OSError as cause:
        with contextlib.suppress(OperationError):  # a disk that takes no write does not remove anything either
            forget_transfer(part)
        if cause.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise disk_error(part, cause) from cause
        raise OperationError(
            ErrorCode.NO_SPACE,
            f"cannot write {part}: {cause.strerror}",
            f"Free {transfer.result_size_bytes} bytes on the file system of {part.parent}.",
        ) from cause


def _run(fetcher: Fetcher, transfer: Transfer, base: Base | None, part: Path, progress: Progress) -> None:
    resume = load_progress(_memory(part), transfer)
    run = _Run(fetcher, transfer, base, part, progress)
    if resume is not None:
        try:
            run.apply(resume)
        except OperationError as error:
            if error.code not in (ErrorCode.DELTA_INVALID, ErrorCode.DELTA_WRONG_RESULT):
                raise
        else:
            return
        # The part was not what it was remembered to be: a power cut loses what was not synced. Start over.
        _forget_progress(part)
    run.apply(None)


def forget_transfer(part: Path) -> None:
    """The part and what was remembered of it are gone. Raises `disk-failed`."""
    with disk_errors(part):
        part.unlink(missing_ok=True)
        _forget_progress(part)


def _memory(part: Path) -> Path:
    return part.with_suffix(".progress")


def _new_memory(part: Path) -> Path:
    return part.with_suffix(".progress-new")


def _forget_progress(part: Path) -> None:
    _memory(part).unlink(missing_ok=True)
    _new_memory(part).unlink(missing_ok=True)


def load_progress(memory: Path, transfer: Transfer) -> Checkpoint | None:
    """What was remembered of this very transfer, or None. A hint only: the part's bytes decide."""
    try:
        with memory.open("rb") as file:
            document = json.loads(file.read(_MAX_PROGRESS_BYTES))
        if document["schema"] != SCHEMA or document["transfer"] != transfer.sha256:
            return None
        mark = Checkpoint(_promised(transfer), **document["checkpoint"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    numbers = (mark.delta_offset, mark.produced, mark.cursor, mark.crc)
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        return None
    return mark if mark.delta_offset < transfer.size_bytes else None


def _promised(transfer: Transfer) -> DeltaInfo:
    """What the delta's own header has to say, as the signed entry says it; the bounds are the decoder's own."""
    return DeltaInfo(transfer.base_sha256, transfer.base_size_bytes, transfer.result_sha256, transfer.result_size_bytes)


@dataclass(slots=True)
class _Run:
    fetcher: Fetcher
    transfer: Transfer
    base: Base | None
    part: Path
    progress: Progress

    def apply(self, resume: Checkpoint | None) -> None:
        info = apply_delta(
            self.base.path if self.base else None,
            self._chunks(resume.delta_offset if resume else 0),
            self.part,
            base_sha256=self.base.sha256 if self.base else None,
            resume=resume,
            on_checkpoint=self._remember,
        )
        _forget_progress(self.part)
        if info != replace(_promised(self.transfer), segment_bytes=info.segment_bytes, window_bytes=info.window_bytes):
            self.part.unlink(missing_ok=True)
            raise OperationError(
                ErrorCode.ENTRY_INVALID,
                f"cannot use {self.transfer.name}: its header does not say what its signed entry says",
                "Publish again with avocadoctl, and look at who else holds a release key.",
            )

    def _remember(self, mark: Checkpoint) -> None:
        checkpoint = asdict(mark)
        del checkpoint["info"]  # the signed entry knows it
        document: dict[str, Any] = {"schema": SCHEMA, "transfer": self.transfer.sha256, "checkpoint": checkpoint}
        temporary, memory = _new_memory(self.part), _memory(self.part)
        with temporary.open("w", encoding="ascii") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())  # the part was synced just before: a power cut keeps both
        temporary.replace(memory)
        folder = os.open(memory.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _chunks(self, start: int) -> Iterator[bytes]:
        """The transfer's bytes from `start` on, each chunk verified before it is given out."""
        size = self.transfer.chunk_bytes
        number = start // size
        skip = start - number * size
        whole = hashlib.sha256() if start == 0 else None
        pauses = iter(PAUSES_S)
        first: OperationError | None = None
        while number < len(self.transfer.chunk_sha256):
            try:
                for chunk in _cut(self._stream(number * size), size):
                    self._verify(number, chunk)
                    number += 1
                    pauses, first = iter(PAUSES_S), None
                    if whole is not None:
                        whole.update(chunk)
                    self.progress(min(number * size, self.transfer.size_bytes), self.transfer.size_bytes)
                    yield chunk[skip:]
                    skip = 0
            except OperationError as error:
                if error.code not in _AGAIN:
                    raise
                first = first or error
                pause_s = next(pauses, None)
                if pause_s is None or isinstance(error, HostGoneError):
                    raise first from first.__cause__
                self.fetcher.pause(pause_s)
        if whole is not None and whole.hexdigest() != self.transfer.sha256:
            raise self._mismatch("its bytes")

    def _stream(self, offset: int) -> Iterator[bytes]:
        path = f"targets/{self.transfer.sha256}.{self.transfer.name}"
        return self.fetcher.get(path, self.transfer.size_bytes, exact=True, offset=offset)

    def _verify(self, number: int, chunk: bytes) -> None:
        if hashlib.sha256(chunk).hexdigest() != self.transfer.chunk_sha256[number]:
            first = number * self.transfer.chunk_bytes
            raise self._mismatch(f"bytes {first} to {first + len(chunk) - 1}")

    def _mismatch(self, what: str) -> OperationError:
        return OperationError(
            ErrorCode.HASH_MISMATCH,
            f"cannot use {self.transfer.name}: {what} do not match their signed hash",
            "Deploy again; if it happens again, look at what stands between this board and the repository.",
        )


def _cut(pieces: Iterator[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in chunks of one size, the last one excepted."""
    held = bytearray()
    for piece in pieces:
        held += piece
        while len(held) >= size:
            yield bytes(held[:size])
            del held[:size]
    if held:
        yield bytes(held)

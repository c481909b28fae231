"""A file that stands under its name complete and on disk, or not at all.

What is written lies beside it under its name and a few letters that nobody else has, so runs at the same time do not
meet, the last one to end wins, and what a killed one leaves says what it was to become. A name that stands for
something else than a file, or for a file that is being read, is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from agent.contract.errors import ErrorCode, OperationError

# A name may have 255 bytes; the rest is for the dots, the letters and the suffix.
_NAME_BYTES = 220
_FULL = ErrorCode.NO_SPACE, "Free space on the file system of {folder}."
_FORBIDDEN = ErrorCode.NOT_PERMITTED, "Name a file in a folder that you may write to."
_FAILURES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: _FULL,
    errno.EACCES: _FORBIDDEN,
    errno.EPERM: _FORBIDDEN,
    errno.EROFS: _FORBIDDEN,
    errno.ENAMETOOLONG: (ErrorCode.USAGE, "Give it a shorter name."),
}
_OTHER = ErrorCode.DISK_FAILED, "Check the disk: journalctl -k -b -p warning"


@contextlib.contextmanager
def whole_file(out: Path, *inputs: Path | None) -> Iterator[Path]:
    """An empty file to write; it becomes `out` when the block ends, and is gone when the block raises.

    `inputs` are what the block reads. Raises `usage`, `not-found`, `not-permitted` or `no-space`.
    """
    begun = os.fsdecode(os.fsencode(out.name)[:_NAME_BYTES])
    part = out.with_name(f".{begun}.{secrets.token_hex(4)}.part")
    try:
        _refuse(out, [path for path in inputs if path is not None])
        try:
            # In here: whoever ends this process may do so as soon as the file is there.
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
            yield part
            _sync(part, os.O_RDONLY)
            part.replace(out)
            _sync(out.parent, os.O_RDONLY | os.O_DIRECTORY)
        finally:
            part.unlink(missing_ok=True)
    except OSError as cause:
        code, remedy = _FAILURES.get(cause.errno or 0, _OTHER)
        raise OperationError(code, f"cannot write {out}: {cause.strerror}", remedy.format(folder=out.parent)) from cause


def _refuse(out: Path, inputs: list[Path]) -> None:
    if not out.parent.is_dir():
        raise OperationError(
            ErrorCode.NOT_FOUND,
            f"cannot write {out}: there is no folder {out.parent}",
            f"Make it first: mkdir -p {out.parent}",
        )
    if not out.exists():
        return
    if not out.is_file():
        raise OperationError(
            ErrorCode.USAGE, f"cannot write {out}: it is not a file", "Name a new file, or one to replace."
        )
    for path in inputs:
        if out.samefile(path):
            raise OperationError(
                ErrorCode.USAGE, f"cannot write {out}: it is {path}, which is read for it", "Name another file."
            )


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

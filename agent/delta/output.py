"""A file that stands under its name complete and on disk, or not at all.

What is written lies beside it under a name that nobody else has, so runs at the same time do not meet, and the last one
to end wins. A name that stands for something else than a file, or for a file that is being read, is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from agent.contract.errors import ErrorCode, OperationError


@contextlib.contextmanager
def whole_file(out: Path, *inputs: Path | None) -> Iterator[Path]:
    """An empty file to write; it becomes `out` when the block ends, and is gone when the block raises.

    `inputs` are what the block reads. Raises `usage`, `not-found` or `no-space`.
    """
    _refuse(out, [path for path in inputs if path is not None])
    part = out.with_name(f".{secrets.token_hex(8)}.part")
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        yield part
        _sync(part, os.O_RDONLY)
        part.replace(out)
        _sync(out.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as cause:
        if cause.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OperationError(
                ErrorCode.NO_SPACE,
                f"cannot write {out}: {cause.strerror}",
                f"Free space on the file system of {out.parent}.",
            ) from cause
        raise OperationError(ErrorCode.INTERNAL, f"cannot write {out}: {cause.strerror}") from cause
    finally:
        part.unlink(missing_ok=True)


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

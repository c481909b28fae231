"""What a disk refuses, said in one way: it is full, or takes no write any more. Which file, why, and what to type."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from agent.contract.errors import ErrorCode, OperationError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def disk_error(path: Path, cause: OSError) -> OperationError:
    """`no-space` or `disk-failed`, for what was to be written at `path`."""
    message = f"cannot write {path}: {cause.strerror or cause}"
    if cause.errno in _FULL:
        return OperationError(ErrorCode.NO_SPACE, message, f"Free space on the file system of {path.parent}.")
    return OperationError(ErrorCode.DISK_FAILED, message, "Check the disk: journalctl -k -b -p warning")


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Whatever the system refuses in the block becomes an error about `path`."""
    try:
        yield
    except OSError as cause:
        raise disk_error(path, cause) from cause

"""One process at a time: a lock that ends with whoever holds it, however that ends, and names its holder meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from agent.contract.errors import ErrorCode, OperationError

# Signing takes a moment, encoding minutes: whoever meets the first one need not be sent away.
PATIENCE_S = 30.0
_LOOK_S = 0.1


@contextlib.contextmanager
def alone(lock: Path, doing: str) -> Iterator[None]:
    """Nobody else is within a block of the same lock file. `doing` reads after "cannot". Raises `change-running`."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _take(descriptor, doing)
        os.truncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, doing: str) -> None:
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as cause:
            if time.monotonic() >= until:
                holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
                raise OperationError(
                    ErrorCode.CHANGE_RUNNING,
                    f"cannot {doing}: pid {holder or 'unknown'} is at it",
                    "Try again when that has ended.",
                ) from cause
            time.sleep(_LOOK_S)
        else:
            return

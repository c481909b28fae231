"""Who may read the agent's state on disk: the same people who may read it on the bus.

The journal, the manifests and the trust state open to root and the group avocado. Images open to root alone: a confext
image holds files of /etc that their own modes keep from others, and an image is read past those modes. Modes of folders
do it, so that no file inside is ever open for a moment. Their group is the unit's to give: the agent has no
right to change owners. Where nobody gave it, only root reads.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

READABLE = ("changes", "runtimes", "metadata")
ROOT_ONLY = ("images",)
_LOG = logging.getLogger("avocado.privacy")


def keep_private(state: Path) -> None:
    """Every folder of the state exists and has its mode.

    A link to another disk is left as whoever made it wants it. A disk that takes no change any more is a warning: the
    agent still says what it sees.
    """
    for name in (*READABLE, *ROOT_ONLY):
        folder = state / name
        if folder.is_symlink():
            continue
        try:
            _keep(folder, 0o750 if name in READABLE else 0o700)
        except OSError as cause:
            _LOG.warning("cannot keep %s from others: %s", folder, cause.strerror)


def _keep(folder: Path, mode: int) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)

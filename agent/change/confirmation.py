"""The word that somebody outside gives for a change that may have locked everybody out.

The waiting step and the bus share it: `confirm` comes over a connection made after the switch, which proves that one
can still be made. It lives in memory, since a change that is interrupted while it waits is reverted.
"""

from __future__ import annotations

import threading


class Confirmation:
    """Given once for the change that waits."""

    def __init__(self) -> None:
        self._given = threading.Event()

    def withdraw(self) -> None:
        """A word given for an earlier change does not count."""
        self._given.clear()

    def give(self) -> None:
        """Somebody came back."""
        self._given.set()

    def given(self) -> bool:
        """Whether somebody came back."""
        return self._given.is_set()

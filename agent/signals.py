"""What reaches into the thread of a change from outside."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from agent.change.step import Shutdown


@dataclass(frozen=True, slots=True)
class Signals:
    """The daemon stops, or somebody cancels the change."""

    stopping: threading.Event
    cancelled: threading.Event

    def wait(self, seconds: float) -> None:
        """Sleep; raises Shutdown when the daemon stops meanwhile."""
        if self.stopping.wait(seconds):
            raise Shutdown

    def is_cancelled(self) -> bool:
        """Whether a transfer should end; raises Shutdown when the daemon stops."""
        self.wait(0)
        return self.cancelled.is_set()

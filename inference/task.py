"""The one thing a worker is on, and until when it may be.

Two deadlines: after the soft one somebody else is asked as well, after the hard one the worker is taken to be hung. The
hard one is put off by the time the worker had no CPU (see `inference.starvation`), up to ten times its length: slow is
not hung, and on a loaded board a fresh worker would be starved too, after minutes of compiling.
"""

from __future__ import annotations

from dataclasses import dataclass

from inference.records import Kind
from inference.starvation import Share, had_s, share_of

_STARVED_FACTOR = 10.0
_STARVED_LOOK_S = 0.005


@dataclass(slots=True)
class Task:
    """A frame or a golden frame that was sent to a worker."""

    kind: Kind
    sequence: int
    sent_at: float
    soft_at: float
    hard_at: float
    last_at: float
    late: bool = False
    watched_at: float = 0.0
    due_s: float = 0.0
    share: Share | None = None

    @classmethod
    def sent(cls, kind: Kind, sequence: int, now: float, soft_s: float, hard_s: float) -> Task:
        """A task that begins now."""
        return cls(kind, sequence, now, now + soft_s, now + hard_s, now + hard_s * _STARVED_FACTOR)

    @property
    def next_at(self) -> float:
        """The next deadline."""
        return self.hard_at if self.late else self.soft_at

    def watch(self, pid: int, now: float) -> None:
        """Keep book of the worker's CPU from here on. Costs two reads of /proc, so not for frames that are in time."""
        self.watched_at, self.due_s, self.share = now, self.hard_at - now, share_of(pid)

    def starved(self, pid: int, now: float) -> bool:
        """Whether the worker, watched from the start, had no more than its soft deadline's worth of CPU and sleep."""
        return had_s(self.share, share_of(pid), now - self.watched_at) < self.soft_at - self.sent_at

    def hung(self, pid: int, now: float) -> bool:
        """Whether the worker had all its time and gave no answer; puts the hard deadline off where it had not."""
        if now < self.hard_at:
            return False
        missing_s = self.due_s - had_s(self.share, share_of(pid), now - self.watched_at)
        if missing_s <= 0 or now >= self.last_at:
            return True
        self.hard_at = min(self.last_at, now + max(missing_s, _STARVED_LOOK_S))
        return False

"""How long the services were away: from the stop to the first answer of the new set."""

from __future__ import annotations

from agent.ports.protocols import Clock


class Absence:
    """A stopwatch that two steps share. It lives in memory: a change that is resumed measures nothing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began: float | None = None

    def begins(self) -> None:
        """The first service is about to be stopped."""
        self._began = self._clock.monotonic()

    def ends(self) -> float | None:
        """Seconds since it began, once; None when nothing was measured."""
        began, self._began = self._began, None
        return None if began is None else round(self._clock.monotonic() - began, 3)

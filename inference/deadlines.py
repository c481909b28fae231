"""How long an answer may take: learned from the answers themselves, within the profile's floor and ceiling.

Pure. Late answers count too, so a device that has become slower for good gets a longer deadline, up to the ceiling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

_WINDOW = 1000
_ENOUGH = 50
_FIRST_INVOKE_FACTOR = 3.0
_FIRST_INVOKE_FLOOR_S = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """One backend's limits; see `[deadlines]` of an accelerator profile."""

    create_s: float
    prepare_s: float
    first_invoke_s: float
    soft_ms_floor: float
    soft_ms_ceiling: float
    soft_factor: float
    hard_factor: float


class Latencies:
    """The last thousand latencies, in milliseconds."""

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=_WINDOW)
        self._unseen = 0
        self._p99: float | None = None

    def add(self, latency_ms: float) -> None:
        """Count one answer. The percentile behind the deadlines is renewed every 50."""
        self._window.append(latency_ms)
        self._unseen += 1
        if self._unseen >= _ENOUGH:
            self._unseen = 0
            self._p99 = self.percentiles()["p99"]

    def percentiles(self) -> Mapping[str, float]:
        """p50, p95 and p99 of the window; zeros while it is empty."""
        ordered = sorted(self._window)
        if not ordered:
            return {"p50": 0.0, "p95": 0.0, "p99": 0.0}
        last = len(ordered) - 1
        return {f"p{part}": round(ordered[round(last * part / 100)], 3) for part in (50, 95, 99)}

    def soft_s(self, limits: Limits) -> float:
        """Seconds after which somebody else is asked as well; the ceiling until enough was seen."""
        if self._p99 is None:
            return limits.soft_ms_ceiling / 1000
        return min(limits.soft_ms_ceiling, max(limits.soft_ms_floor, self._p99 * limits.soft_factor)) / 1000

    def hard_s(self, limits: Limits) -> float:
        """Seconds after which the worker is taken to be hung."""
        return self.soft_s(limits) * limits.hard_factor


def first_invoke_s(limits: Limits, longest_seen_s: float | None) -> float:
    """The first invoke of a fresh worker, which may compile; three times what it took before, where that is known."""
    if longest_seen_s is None:
        return limits.first_invoke_s
    return min(limits.first_invoke_s, max(_FIRST_INVOKE_FLOOR_S, longest_seen_s * _FIRST_INVOKE_FACTOR))

"""What a lane tells the supervisor: the fate of a frame, or of a golden frame."""

from __future__ import annotations

from dataclasses import dataclass

from inference.policy import Reason


@dataclass(frozen=True, slots=True)
class Posed:
    """A pose came, in time or late."""

    sequence: int
    pose: bytes


@dataclass(frozen=True, slots=True)
class Late:
    """The frame missed its soft deadline; the worker is left alone."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker that had this frame is gone."""

    sequence: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Tested:
    """The golden frame has been judged, or can no longer be."""

    passed: bool
    oks: float
    reason: Reason
    latency_ms: float


Outcome = Posed | Late | Lost | Tested

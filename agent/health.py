"""Health: samples of a running set go in, healthy, unhealthy or undecided comes out.

Pure: no clock and no bus; the caller takes the samples and says when. The rules are DESIGN's "Healthy means".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnitState:
    """A unit as systemd describes it. `restarts` is NRestarts; `main_pid` is 0 when nothing runs."""

    name: str
    load: str  # loaded | not-found | masked ...
    active: str  # active | activating | inactive | failed ...
    sub: str
    result: str
    main_pid: int
    restarts: int
    description: str = ""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The golden frame's verdict. `oks` is object keypoint similarity 0..1 against the model's recorded pose."""

    passed: bool
    backend: str
    oks: float
    reason: str


@dataclass(frozen=True, slots=True)
class InferenceState:
    """What `org.avocado.Inference1.Describe()` says, as far as the agent reads it."""

    state: str  # starting | serving | degraded | no-camera ...
    backend: str  # npu | cpu | none
    reason: str
    required_backend: str  # npu | any
    model: str
    frames: int
    camera: bool
    first_invoke_done: bool
    nodes: tuple[str, ...]
    settle_s: float
    contexts: int

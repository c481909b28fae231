"""What the service knows about itself, in the words of the bus, the page and the metrics.

Pure: a `Situation` of plain facts becomes a state, one document and one line of text. The document's keys are those of
`Inference1.Describe` (units/dbus-1/interfaces/org.avocado.Inference1.xml); keys are only ever added.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference.link import SupervisorState
from inference.policy import Backend, Reason

EVENTS_KEPT = 20
_FPS_WINDOW_S = 2.0


class State(StrEnum):
    """How the service is, as the bus says it."""

    STARTING = "starting"
    SERVING = "serving"
    DEGRADED = "degraded"
    NO_CAMERA = "no-camera"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered frame: image uint8[height, width, 3]; points float32[17, 3] (y, x in its pixels, score 0..1)."""

    sequence: int
    image: NDArray[np.uint8]
    points: NDArray[np.float32]
    backend: Backend
    reason: Reason
    fell_back: bool
    latency_ms: float
    answered_at: float


@dataclass(frozen=True, slots=True)
class Event:
    """Something worth telling on the page: when (ISO 8601, for people), what, and in which colour."""

    at: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Identity:
    """What does not change while the service runs."""

    model_name: str
    model_version: str
    model_folder: str
    required_backend: str
    accelerator_name: str
    accelerator_nodes: tuple[str, ...]
    accelerator_settle_s: float
    accelerator_contexts: int
    accelerator_has_npu: bool
    frame_rate_fps: float
    page: str


@dataclass(frozen=True, slots=True)
class CameraView:
    """The camera as the feed sees it; `connected` is None until it was tried."""

    source: str
    connected: bool | None
    overwritten: int = 0
    damaged: int = 0
    problem: str = ""


@dataclass(slots=True)
class Tally:
    """What the service counts itself, beside the supervisor's numbers."""

    unanswered: int = 0
    last_was_answered: bool = True
    stopping: bool = False
    answered_at: deque[float] = field(default_factory=lambda: deque(maxlen=600))
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))

    def answered(self, now: float) -> None:
        """Count an answered frame."""
        self.last_was_answered = True
        self.answered_at.append(now)

    def refused(self) -> None:
        """Count a frame that no backend answered."""
        self.last_was_answered = False
        self.unanswered += 1

    def fps(self, now: float) -> float:
        """Answered frames a second over the last two."""
        recent = sum(1 for at in self.answered_at if now - at <= _FPS_WINDOW_S)
        return recent / _FPS_WINDOW_S


def state_of(identity: Identity, supervision: SupervisorState, camera: CameraView, tally: Tally) -> State:
    """Degraded means: it answers, but not as this board could, or the last frame got no answer."""
    if tally.stopping:
        return State.STOPPING
    if camera.connected is False:
        return State.NO_CAMERA
    if not tally.last_was_answered:
        return State.DEGRADED
    if not tally.answered_at:
        return State.STARTING
    if identity.accelerator_has_npu and supervision.backend is not Backend.NPU:
        return State.DEGRADED
    return State.SERVING


def describe(
    identity: Identity, supervision: SupervisorState, camera: CameraView, tally: Tally, now: float
) -> dict[str, Any]:
    """The whole state as one JSON-able document."""
    return {
        "state": state_of(identity, supervision, camera, tally).value,
        "backend": supervision.backend.value,
        "reason": supervision.reason.value,
        "phase": supervision.phase.value,
        "message": supervision.message,
        "remedy": supervision.remedy,
        "required_backend": identity.required_backend,
        "model": {
            "name": identity.model_name,
            "version": identity.model_version,
            "folder": identity.model_folder,
        },
        "accelerator": {
            "name": identity.accelerator_name,
            "nodes": list(identity.accelerator_nodes),
            "settle_s": identity.accelerator_settle_s,
            "contexts": identity.accelerator_contexts,
        },
        "frames": supervision.frames,
        "unanswered": tally.unanswered,
        "fallbacks": supervision.fallbacks,
        "restarts": supervision.restarts,
        "camera": {
            "source": camera.source,
            "connected": bool(camera.connected),
            "problem": camera.problem,
            "overwritten": camera.overwritten,
            "damaged": camera.damaged,
        },
        "first_invoke_done": supervision.first_invoke_done,
        "scheduling": supervision.scheduling,
        "latency_ms": {key: round(supervision.latency_ms.get(key, 0.0), 3) for key in ("p50", "p95", "p99")},
        "deadline_ms": _deadlines(supervision),
        "fps": round(tally.fps(now), 1),
        "required_fps": identity.frame_rate_fps,
        "page": identity.page,
        "events": [{"at": event.at, "kind": event.kind, "text": event.text} for event in tally.events],
    }


def _deadlines(supervision: SupervisorState) -> dict[str, float]:
    """When the CPU is asked as well, and when the preferred backend's worker is given up."""
    preferred = supervision.backends.get(Backend.NPU) or supervision.backends.get(Backend.CPU) or {}
    return {key: round(float(preferred.get(f"{key}_ms", 0.0)), 1) for key in ("soft", "hard")}


def one_line(document: Mapping[str, Any]) -> str:
    """The document as the STATUS= that `systemctl status` shows."""
    state, backend, reason = document["state"], document["backend"], document["reason"]
    why = "" if reason in {Reason.OK, Reason.NO_NPU} else f" ({reason})"
    text = f"{state} on {backend}{why}, {document['fps']:.0f} fps, p95 {document['latency_ms']['p95']:.1f} ms"
    if state == State.NO_CAMERA:
        text = f"no camera: {document['camera']['problem']}"
    return f"{text}; {document['model']['name']} {document['model']['version']}"

"""The service's end of the supervisor: an asyncio client that turns a crop into a pose.

`SupervisorLink.start` spawns the supervisor process, which spawns the zygote, which forks one worker per backend. Frames
travel in one sealed memfd, tokens and answers over one SEQPACKET socket. Every frame asked for is answered by some
backend or refused with an `InferenceError` in bounded time. When the link closes, or its process dies, nothing that it
started lives on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inference.policy import Backend, Phase, Reason


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """What to run and where.

    `profile` is the path of an accelerator profile, or the name of a shipped one. `run_dir` is a writable folder
    (the service's RuntimeDirectory). `overrides` replaces parts of the profile, for tests: the same nested keys as the
    TOML file, for example `{"nodes": [], "delegate": {"path": ..., "options": {...}}, "recovery": {"backoff_s": 0.05}}`.
    """

    model_dir: Path
    profile: str
    run_dir: Path
    overrides: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """One frame's pose (float32[17, 3]: y, x in 0..1 of the crop, score) and who made it.

    `fell_back`: the CPU answered although this board has an NPU; `reason` says why. `latency_ms` counts from `infer`
    being called to the answer.
    """

    sequence: int
    pose: npt.NDArray[np.float32]
    backend: Backend
    reason: Reason
    latency_ms: float
    fell_back: bool


@dataclass(frozen=True, slots=True)
class SupervisorState:
    """What the supervisor said last, twice a second and after each switch.

    `phase` is the preferred backend's. `first_invoke_done`: the preferred backend has answered once or failed once, so
    nothing is compiling any more. `scheduling` is `fifo` or why not. `message`: the last failure in words.
    """

    phase: Phase
    backend: Backend
    reason: Reason
    frames: int
    fallbacks: int
    restarts: int
    latency_ms: Mapping[str, float]
    first_invoke_done: bool
    heartbeat_monotonic: float
    workers: Mapping[str, int]
    model: Mapping[str, str]
    scheduling: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """The golden frame on the serving backend. `oks` is 0.0 when no backend could run it."""

    passed: bool
    backend: Backend
    oks: float
    reason: Reason


class SupervisorLink:
    """A running supervisor, as the service sees it."""

    state: SupervisorState

    @classmethod
    async def start(cls, settings: SupervisorSettings) -> SupervisorLink:
        """Spawn the supervisor; returns when it is up. Backends may still be starting, or have failed: see `state`."""
        raise NotImplementedError

    async def infer(self, crop: npt.NDArray[np.uint8]) -> Answer:
        """The pose in a crop uint8[192, 192, 3]; InferenceError when no backend answers. Calls may overlap."""
        raise NotImplementedError

    async def self_test(self) -> SelfTestResult:
        """Run the golden frame on the serving backend now."""
        raise NotImplementedError

    async def wait_serving(self, timeout_s: float) -> Backend:
        """The serving backend, as soon as there is one; InferenceError when every backend gave up or time is over."""
        raise NotImplementedError

    def on_backend_changed(self, callback: Callable[[Backend, Backend, Reason], None]) -> None:
        """Call `callback(from, to, reason)` in the event loop at every switch."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop the supervisor and everything below it; bounded by about three seconds."""
        raise NotImplementedError

"""The frame loop: cut where the person was, ask the supervisor, map the pose back, decide where to look next.

Every frame it takes becomes a `Sample` or a counted refusal; it never waits for a viewer. It knows the supervisor by
one method, so that a test can put a small program in its place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inference import journal
from inference.capture.source import Frame
from inference.errors import InferenceError
from inference.link import Answer
from inference.pose import Crop, initial_crop, next_crop, to_frame
from inference.status import Sample, Tally
from inference.tensors import cut

_log = logging.getLogger(__name__)


class Frames(Protocol):
    """The camera, as this loop needs it."""

    async def next_frame(self) -> Frame:
        """The newest frame that was not handed out yet."""


class Inferring(Protocol):
    """The supervisor, as this loop needs it."""

    async def infer(self, crop: NDArray[np.uint8]) -> Answer:
        """The pose in a crop, or InferenceError."""


class Tracker:
    """Follows one person through the frames of one camera."""

    def __init__(
        self, frames: Frames, link: Inferring, input_size: int, tally: Tally, publish: Callable[[Sample], None]
    ) -> None:
        self._frames = frames
        self._link = link
        self._input_size = input_size
        self._tally = tally
        self._publish = publish
        self._crop: Crop | None = None
        self._frame_size = (0, 0)

    async def run(self) -> None:
        """Answer frames until cancelled."""
        while True:
            await self.answer(await self._frames.next_frame())

    async def answer(self, frame: Frame) -> None:
        """Answer one frame and publish it."""
        height, width = frame.image.shape[:2]
        if self._crop is None or self._frame_size != (width, height):
            self._frame_size = (width, height)
            self._crop = initial_crop(self._frame_size)
        crop = self._crop
        try:
            answer = await self._link.infer(cut(frame.image, crop, self._input_size))
        except InferenceError as error:
            # Said once per outage: at a camera's rate the journal would hold nothing else.
            if self._tally.last_was_answered:
                _log.error("%s", error.message, extra=journal.event(journal.FRAME_UNANSWERED))
            self._tally.refused()
            return
        points = to_frame(answer.pose, crop)
        self._crop = next_crop(points, self._frame_size)
        now = time.monotonic()
        self._tally.answered(now)
        self._publish(
            Sample(
                sequence=answer.sequence,
                image=frame.image,
                points=points,
                backend=answer.backend,
                reason=answer.reason,
                fell_back=answer.fell_back,
                latency_ms=answer.latency_ms,
                answered_at=now,
            )
        )

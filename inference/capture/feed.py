"""The camera's thread: opens, reads, reopens with backoff, and hands the newest frame to asyncio.

A camera that is absent is a state (`connected` is False), never an end. The reader always gets the newest frame: one
that it had no time for is overwritten and counted, so a slow moment costs frames and never delay.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from inference.capture.source import Camera, CameraLostError, DamagedFrameError, Frame

_FIRST_BACKOFF_S = 0.5
_LONGEST_BACKOFF_S = 10.0

_log = logging.getLogger(__name__)


class CameraFeed:
    """Frames of one camera, for one reader in the loop that started it."""

    def __init__(self, camera: Camera, on_change: Callable[[bool, str], None]) -> None:
        """`on_change(connected, why)` is called in the loop whenever the camera comes or goes."""
        self._camera = camera
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self._stopped = threading.Event()
        self._fresh = asyncio.Event()
        self._frame: Frame | None = None
        self.connected: bool | None = None
        self.source = camera.name
        self.overwritten = 0
        self.damaged = 0

    async def run(self) -> None:
        """Read the camera until `stop`; a programming mistake in its thread is raised here."""
        with ThreadPoolExecutor(1, "camera") as thread:
            try:
                await self._loop.run_in_executor(thread, self._read_all)
            finally:
                self.stop()

    async def next_frame(self) -> Frame:
        """Wait for a frame that was not handed out yet; the newest there is."""
        await self._fresh.wait()
        self._fresh.clear()
        frame, self._frame = self._frame, None
        if frame is None:
            raise AssertionError("the event is set only together with a frame")
        return frame

    def stop(self) -> None:
        """Let the thread end at its next look, a quarter of a second away at most."""
        self._stopped.set()

    def _read_all(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._stopped.is_set():
            try:
                self._camera.open()
                self._tell(self._came, self._camera.name)
                while (frame := self._read()) is not None:
                    backoff_s = _FIRST_BACKOFF_S
                    self._tell(self._take, frame)
            except CameraLostError as lost:
                self._tell(self._went, lost.message)
            finally:
                self._camera.close()
            self._stopped.wait(backoff_s)
            backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)

    def _read(self) -> Frame | None:
        while True:
            try:
                return self._camera.read(self._stopped)
            except DamagedFrameError as damaged:
                self.damaged += 1
                _log.debug("%s", damaged.message)
                if self._stopped.is_set():
                    return None

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        if not self._stopped.is_set():
            self._loop.call_soon_threadsafe(function, *arguments)

    def _take(self, frame: Frame) -> None:
        if self._frame is not None:
            self.overwritten += 1
        self._frame = frame
        self._fresh.set()

    def _came(self, name: str) -> None:
        self.source = name
        if self.connected is not True:
            self.connected = True
            self._on_change(True, name)

    def _went(self, why: str) -> None:
        if self.connected is not False:
            self.connected = False
            self._on_change(False, why)

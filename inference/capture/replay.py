"""A folder of JPEGs played in a loop at the camera's rate.

The picture that is shown follows the clock, not the reader: a reader that comes late misses pictures, as with a real
camera, and the sequence never drifts. Files are read when they are due, so that a swapped extension shows at once.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from inference.capture.source import CameraLostError, Frame, decode_jpeg


class ReplayCamera:
    """The pictures of one folder, in the order of their names."""

    def __init__(self, folder: Path, fps: float) -> None:
        self._folder = folder
        self._period_s = 1.0 / fps
        self._pictures: list[Path] = []
        self._started_at = 0.0
        self._tick = -1

    @property
    def name(self) -> str:
        """`replay:FOLDER`."""
        return f"replay:{self._folder}"

    def open(self) -> None:
        """List the folder and start the clock."""
        try:
            self._pictures = sorted(path for path in self._folder.iterdir() if path.suffix.lower() in {".jpg", ".jpeg"})
        except OSError as error:
            raise CameraLostError(f"cannot open camera {self.name}: {error.strerror}", "set camera.source") from error
        if not self._pictures:
            raise CameraLostError(
                f"cannot open camera {self.name}: it holds no .jpg files", "put a JPEG sequence there"
            )
        self._started_at = time.monotonic()
        self._tick = -1

    def read(self, stopped: threading.Event) -> Frame | None:
        """Wait until the next picture is due, skipping those that are already past."""
        if not self._pictures:
            raise CameraLostError(f"cannot read camera {self.name}: it is not open")
        now = time.monotonic()
        current = int((now - self._started_at) / self._period_s)
        if current <= self._tick:
            current = self._tick + 1
            if stopped.wait(self._started_at + current * self._period_s - now):
                return None
        self._tick = current
        picture = self._pictures[current % len(self._pictures)]
        captured_at = time.monotonic()
        try:
            data = picture.read_bytes()
        except OSError as error:
            raise CameraLostError(f"cannot read camera {self.name}: {picture.name}: {error.strerror}") from error
        return Frame(current, decode_jpeg(data, picture.name), captured_at)

    def close(self) -> None:
        """Forget the pictures."""
        self._pictures = []

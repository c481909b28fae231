"""What a camera is, which one "auto" means, and how a JPEG becomes a frame.

A camera is opened, read and closed from one thread and may block there, never longer than until `stopped` is set plus a
fraction of a second. That it is absent or was unplugged is an ordinary state, told by `CameraLostError`; a single frame
that came damaged over the cable is a `DamagedFrameError`, and the next one may be good.
"""

from __future__ import annotations

import io
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from inference.config import CameraConfig
from inference.errors import InferenceError

REPLAY_FOLDER = Path("/usr/share/avocado/replay")

Pixels = NDArray[np.uint8]


class CameraLostError(InferenceError):
    """The camera is not there, or not any more; opening it again later may help."""


class DamagedFrameError(InferenceError):
    """One frame could not be decoded."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One picture: uint8[height, width, 3] RGB, and the monotonic second it was taken."""

    number: int
    image: Pixels
    captured_at: float


class Camera(Protocol):
    """Opened, read and closed from one thread."""

    @property
    def name(self) -> str:
        """What status calls it, such as `replay:/usr/share/avocado/replay`."""

    def open(self) -> None:
        """Begin to take pictures, or raise CameraLostError."""

    def read(self, stopped: threading.Event) -> Frame | None:
        """Wait for the next frame; None when `stopped` was set. Raises CameraLostError or DamagedFrameError."""

    def close(self) -> None:
        """Give the device back; harmless when it is not open."""


def decode_jpeg(data: bytes, name: str) -> Pixels:
    """Decode one JPEG to uint8[height, width, 3] RGB."""
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG",)) as picture:
            return np.asarray(picture.convert("RGB"))
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise DamagedFrameError(f"cannot decode {name}: {error}") from error


def open_camera(config: CameraConfig) -> Camera:
    """Make the camera that `camera.source` names; it is not opened yet."""
    # Imported here: they import the values above.
    from inference.capture.replay import ReplayCamera
    from inference.capture.v4l2 import V4l2Camera

    kind, _, argument = config.source.partition(":")
    if kind == "replay":
        return ReplayCamera(Path(argument), config.fps)
    if kind == "v4l2":
        return V4l2Camera(Path(argument), config.width, config.height, config.fps)
    return AutoCamera(config)


class AutoCamera:
    """The first capture device there is when it is opened, otherwise the board's replayed sequence."""

    def __init__(self, config: CameraConfig) -> None:
        self._config = config
        self._chosen: Camera | None = None

    @property
    def name(self) -> str:
        """The chosen camera's name."""
        return self._chosen.name if self._chosen else "auto"

    def open(self) -> None:
        """Choose again each time: a camera may have been plugged in since."""
        from inference.capture.v4l2 import capture_devices

        self.close()
        device = next(iter(capture_devices()), None)
        if device is not None:
            source = f"v4l2:{device}"
        elif REPLAY_FOLDER.is_dir():
            source = f"replay:{REPLAY_FOLDER}"
        else:
            raise CameraLostError(
                f"cannot find a camera: no capture device in /dev and no {REPLAY_FOLDER}",
                "plug in a camera, or set camera.source in /etc/avocado/pose.toml",
            )
        chosen = open_camera(self._config.model_copy(update={"source": source}))
        chosen.open()
        self._chosen = chosen

    def read(self, stopped: threading.Event) -> Frame | None:
        """Read from the chosen camera."""
        if self._chosen is None:
            raise CameraLostError("cannot read a camera that is not open")
        return self._chosen.read(stopped)

    def close(self) -> None:
        """Close the chosen camera."""
        if self._chosen is not None:
            self._chosen.close()
            self._chosen = None

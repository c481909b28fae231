"""A USB camera through V4L2: ioctl and mmap from the standard library, no GStreamer.

Takes MJPEG where the camera offers it (USB 2.0 cannot carry 720p at 30 fps uncompressed), otherwise YUYV. Promises that
an unplugged camera raises CameraLostError within a second. Refuses 32-bit kernels, whose structures are laid out
otherwise. Not yet run on a camera: docs/board-validation.md names the command. Structures follow linux/videodev2.h.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import select
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from inference.capture.source import CameraLostError, DamagedFrameError, Frame, Pixels, decode_jpeg

_CAPTURE = 1  # V4L2_BUF_TYPE_VIDEO_CAPTURE
_MMAP = 1  # V4L2_MEMORY_MMAP
_CAP_VIDEO_CAPTURE = 0x0000_0001
_CAP_STREAMING = 0x0400_0000
_FLAG_ERROR = 0x40  # V4L2_BUF_FLAG_ERROR
_BUFFERS = 4
_UNPLUGGED = {errno.ENODEV, errno.EIO, errno.ENXIO, errno.EPROTO}

MJPEG = b"MJPG"
YUYV = b"YUYV"

CAPABILITY = struct.Struct("=16s32s32sIII12x")
FORMAT = struct.Struct("=I4xII4sIIIIIIIII152x")
STREAM_PARM = struct.Struct("=IIIIIII16x160x")
REQUEST_BUFFERS = struct.Struct("=IIIII")
# index type bytesused flags field | timestamp | timecode | sequence memory offset length reserved2 request_fd
BUFFER = struct.Struct("=IIIII4xqq16xIIQIIi4x")
_INT = struct.Struct("=i")


def _request(direction: int, number: int, size: int) -> int:
    return direction << 30 | size << 16 | ord("V") << 8 | number


_READ, _WRITE = 2, 1
QUERYCAP = _request(_READ, 0, CAPABILITY.size)
S_FMT = _request(_READ | _WRITE, 5, FORMAT.size)
REQBUFS = _request(_READ | _WRITE, 8, REQUEST_BUFFERS.size)
QUERYBUF = _request(_READ | _WRITE, 9, BUFFER.size)
QBUF = _request(_READ | _WRITE, 15, BUFFER.size)
DQBUF = _request(_READ | _WRITE, 17, BUFFER.size)
STREAMON = _request(_WRITE, 18, _INT.size)
STREAMOFF = _request(_WRITE, 19, _INT.size)
S_PARM = _request(_READ | _WRITE, 22, STREAM_PARM.size)


def capture_devices(folder: Path = Path("/dev")) -> Iterator[Path]:
    """Every /dev/videoN that can capture and stream, lowest first; a node that cannot be asked is passed over."""
    nodes = [path for path in folder.glob("video*") if path.name.removeprefix("video").isdigit()]
    for node in sorted(nodes, key=lambda path: int(path.name.removeprefix("video"))):
        try:
            fd = os.open(node, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if _can_capture(fd):
                yield node
        except OSError:
            continue
        finally:
            os.close(fd)


def _can_capture(fd: int) -> bool:
    answer = CAPABILITY.unpack(fcntl.ioctl(fd, QUERYCAP, bytes(CAPABILITY.size)))
    # device_caps speaks of this node; capabilities of the whole device, whose metadata nodes cannot capture.
    wanted = _CAP_VIDEO_CAPTURE | _CAP_STREAMING
    return bool(answer[5] & wanted == wanted)


def yuyv_to_rgb(data: bytes, width: int, height: int, stride: int) -> Pixels:
    """Convert packed YUYV rows of `stride` bytes to uint8[height, width, 3] RGB."""
    if len(data) < stride * height:
        raise DamagedFrameError(f"cannot decode a frame: {len(data)} of {stride * height} bytes")
    rows = np.frombuffer(data, np.uint8, stride * height).reshape(height, stride)[:, : width * 2]
    ycbcr = np.empty((height, width, 3), np.uint8)
    ycbcr[:, :, 0] = rows[:, 0::2]
    ycbcr[:, :, 1] = np.repeat(rows[:, 1::4], 2, axis=1)
    ycbcr[:, :, 2] = np.repeat(rows[:, 3::4], 2, axis=1)
    return np.asarray(Image.frombytes("YCbCr", (width, height), ycbcr.tobytes()).convert("RGB"))


class V4l2Camera:
    """One capture device."""

    def __init__(self, device: Path, width: int, height: int, fps: float) -> None:
        self._device = device
        self._wanted = (width, height, fps)
        self._fd = -1
        self._maps: list[mmap.mmap] = []
        self._width = self._height = self._stride = 0
        self._fourcc = b""

    @property
    def name(self) -> str:
        """`v4l2:/dev/videoN`."""
        return f"v4l2:{self._device}"

    def open(self) -> None:
        """Agree on a format with the driver, map its buffers and start the stream."""
        if struct.calcsize("P") != 8:
            raise CameraLostError(f"cannot open camera {self.name}: only 64-bit systems are supported")
        try:
            self._fd = os.open(self._device, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._agree()
            self._map_buffers()
            fcntl.ioctl(self._fd, STREAMON, _INT.pack(_CAPTURE))
        except OSError as error:
            self.close()
            raise CameraLostError(f"cannot open camera {self.name}: {error.strerror}", _remedy(error)) from error

    def _agree(self) -> None:
        width, height, fps = self._wanted
        for fourcc in (MJPEG, YUYV):
            asked = FORMAT.pack(_CAPTURE, width, height, fourcc, 0, 0, 0, 0, 0, 0, 0, 0, 0)
            answer = FORMAT.unpack(fcntl.ioctl(self._fd, S_FMT, asked))
            if answer[3] == fourcc:
                self._fourcc, self._width, self._height, self._stride = fourcc, answer[1], answer[2], answer[5]
                break
        else:
            raise OSError(errno.EINVAL, "it offers neither MJPEG nor YUYV")
        # A driver without a frame interval answers ENOTTY and keeps its own rate.
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._fd, S_PARM, STREAM_PARM.pack(_CAPTURE, 0, 0, 1000, round(fps * 1000), 0, 0))

    def _map_buffers(self) -> None:
        asked = REQUEST_BUFFERS.pack(_BUFFERS, _CAPTURE, _MMAP, 0, 0)
        count = REQUEST_BUFFERS.unpack(fcntl.ioctl(self._fd, REQBUFS, asked))[0]
        for index in range(count):
            answer = BUFFER.unpack(fcntl.ioctl(self._fd, QUERYBUF, _buffer(index)))
            offset, length = answer[9] & 0xFFFF_FFFF, answer[10]
            self._maps.append(mmap.mmap(self._fd, length, mmap.MAP_SHARED, mmap.PROT_READ, offset=offset))
            fcntl.ioctl(self._fd, QBUF, _buffer(index))

    def read(self, stopped: threading.Event) -> Frame | None:
        """Wait for the driver's next filled buffer; a camera that is silent for five seconds is lost."""
        deadline = time.monotonic() + 5.0
        try:
            while not stopped.is_set():
                if select.select([self._fd], [], [], 0.25)[0]:
                    return self._take()
                if time.monotonic() > deadline:
                    raise CameraLostError(f"cannot read camera {self.name}: no frame for 5 s", "check its cable")
        except OSError as error:
            if error.errno in _UNPLUGGED:
                raise CameraLostError(f"cannot read camera {self.name}: it was unplugged", "plug it in") from error
            raise CameraLostError(f"cannot read camera {self.name}: {error.strerror}") from error
        return None

    def _take(self) -> Frame:
        answer = BUFFER.unpack(fcntl.ioctl(self._fd, DQBUF, _buffer(0)))
        index, used, flags, number = answer[0], answer[2], answer[3], answer[7]
        data = self._maps[index][:used]
        fcntl.ioctl(self._fd, QBUF, _buffer(index))
        if flags & _FLAG_ERROR or not used:
            raise DamagedFrameError(f"cannot decode a frame of {self.name}: the driver marked it damaged")
        captured_at = time.monotonic()
        if self._fourcc == MJPEG:
            return Frame(number, decode_jpeg(data, self.name), captured_at)
        return Frame(number, yuyv_to_rgb(data, self._width, self._height, self._stride), captured_at)

    def close(self) -> None:
        """Stop the stream and give the device back."""
        if self._fd < 0:
            return
        # The device may be gone; closing the descriptor is what counts.
        with contextlib.suppress(OSError):
            fcntl.ioctl(self._fd, STREAMOFF, _INT.pack(_CAPTURE))
        for mapped in self._maps:
            mapped.close()
        self._maps = []
        os.close(self._fd)
        self._fd = -1


def _buffer(index: int) -> bytes:
    return BUFFER.pack(index, _CAPTURE, 0, 0, 0, 0, 0, 0, _MMAP, 0, 0, 0, 0)


def _remedy(error: OSError) -> str:
    if error.errno == errno.EBUSY:
        return "end the other program that uses it"
    if error.errno in {errno.EACCES, errno.EPERM}:
        return "add the service's user to the group video"
    return "check camera.source in /etc/avocado/pose.toml"

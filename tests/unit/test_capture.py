"""Replayed frames keep the camera's clock; a missing camera is a state."""

import asyncio
import errno
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from inference.capture.feed import CameraFeed
from inference.capture.replay import ReplayCamera
from inference.capture.source import CameraLostError, DamagedFrameError, Frame, decode_jpeg
from inference.capture.v4l2 import V4l2Camera, yuyv_to_rgb


def write_sequence(folder: Path, count: int) -> None:
    folder.mkdir(exist_ok=True)
    for index in range(count):
        Image.new("RGB", (64, 48), (40 * index, 0, 0)).save(folder / f"{index:04}.jpg", quality=95)


def shade(frame: Frame | None) -> int:
    assert frame is not None
    return round(int(frame.image[24, 32, 0]) / 40)


def test_the_sequence_plays_in_order_and_loops(tmp_path: Path) -> None:
    write_sequence(tmp_path, 3)
    camera = ReplayCamera(tmp_path, fps=100)
    camera.open()
    frames = [camera.read(threading.Event()) for _ in range(7)]
    numbers = [frame.number for frame in frames if frame is not None]
    assert numbers == sorted(set(numbers))
    assert [shade(frame) for frame in frames] == [number % 3 for number in numbers]


def test_a_late_reader_misses_pictures_and_the_clock_does_not_drift(tmp_path: Path) -> None:
    write_sequence(tmp_path, 5)
    camera = ReplayCamera(tmp_path, fps=50)
    camera.open()
    opened_at = time.monotonic()
    camera.read(threading.Event())
    threading.Event().wait(0.1)
    frame = camera.read(threading.Event())
    assert frame is not None
    assert frame.number >= 4
    assert frame.number <= (time.monotonic() - opened_at) * 50 + 1


def test_stopping_ends_the_wait_for_a_picture(tmp_path: Path) -> None:
    write_sequence(tmp_path, 1)
    camera = ReplayCamera(tmp_path, fps=0.01)
    camera.open()
    stopped = threading.Event()
    assert camera.read(stopped) is not None
    stopped.set()
    assert camera.read(stopped) is None


def test_a_folder_without_pictures_is_a_lost_camera(tmp_path: Path) -> None:
    with pytest.raises(CameraLostError) as caught:
        ReplayCamera(tmp_path, 30).open()
    assert caught.value.message == f"cannot open camera replay:{tmp_path}: it holds no .jpg files"


def test_a_missing_device_is_a_lost_camera(tmp_path: Path) -> None:
    with pytest.raises(CameraLostError) as caught:
        V4l2Camera(tmp_path / "video0", 640, 480, 30).open()
    assert caught.value.message == f"cannot open camera v4l2:{tmp_path}/video0: No such file or directory"


def test_a_device_that_is_no_camera_is_a_lost_camera() -> None:
    with pytest.raises(CameraLostError) as caught:
        V4l2Camera(Path("/dev/null"), 640, 480, 30).open()
    assert "cannot open camera v4l2:/dev/null" in caught.value.message


def test_a_cut_jpeg_is_a_damaged_frame(tmp_path: Path) -> None:
    write_sequence(tmp_path, 1)
    data = (tmp_path / "0000.jpg").read_bytes()
    assert decode_jpeg(data, "x").shape == (48, 64, 3)
    with pytest.raises(DamagedFrameError):
        decode_jpeg(data[: len(data) // 2], "x")


def test_yuyv_becomes_rgb() -> None:
    row = bytes([76, 84, 76, 255]) * 2 + b"\0\0"  # red, and two bytes of padding
    image = yuyv_to_rgb(row * 2, width=4, height=2, stride=10)
    assert image.shape == (2, 4, 3)
    assert np.abs(image.astype(int) - [254, 0, 0]).max() <= 2
    with pytest.raises(DamagedFrameError):
        yuyv_to_rgb(row, width=4, height=2, stride=10)


class PluggedCamera:
    """A camera that can be unplugged: `present` decides, every call is recorded."""

    name = "plugged"

    def __init__(self) -> None:
        self.present = threading.Event()
        self.calls: list[str] = []
        self.number = 0

    def open(self) -> None:
        self.calls.append("open")
        if not self.present.is_set():
            raise CameraLostError("cannot open camera plugged: gone") from OSError(errno.ENODEV, "gone")

    def read(self, stopped: threading.Event) -> Frame | None:
        if stopped.wait(0.01):
            return None
        if not self.present.is_set():
            raise CameraLostError("cannot read camera plugged: it was unplugged")
        self.number += 1
        return Frame(self.number, np.zeros((2, 2, 3), np.uint8), 0.0)

    def close(self) -> None:
        self.calls.append("close")


def test_an_unplugged_camera_is_told_once_and_opened_again() -> None:
    async def scenario() -> None:
        camera = PluggedCamera()
        changes: asyncio.Queue[tuple[bool, str]] = asyncio.Queue()
        feed = CameraFeed(camera, lambda connected, why: changes.put_nowait((connected, why)))
        running = asyncio.create_task(feed.run())
        async with asyncio.timeout(5):
            assert await changes.get() == (False, "cannot open camera plugged: gone")
            camera.present.set()
            assert await changes.get() == (True, "plugged")
            first = await feed.next_frame()
            camera.present.clear()
            assert await changes.get() == (False, "cannot read camera plugged: it was unplugged")
            camera.present.set()
            assert await changes.get() == (True, "plugged")
            assert (await feed.next_frame()).number >= first.number
            feed.stop()
            await running
        assert camera.calls[-1] == "close"
        assert changes.empty()

    asyncio.run(scenario())


def test_a_slow_reader_gets_the_newest_frame() -> None:
    async def scenario() -> None:
        camera = PluggedCamera()
        camera.present.set()
        feed = CameraFeed(camera, lambda *_: None)
        running = asyncio.create_task(feed.run())
        async with asyncio.timeout(5):
            first = await feed.next_frame()
            while feed.overwritten < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (await feed.next_frame()).number >= first.number + 3
            feed.stop()
            await running

    asyncio.run(scenario())

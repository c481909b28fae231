"""Small parts of the pose service: state, crop following, systemd's notifications, journal fields, injected faults."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from inference import journal
from inference.accelerator import load_accelerator
from inference.capture.source import Frame
from inference.drawing import annotate
from inference.errors import InferenceError
from inference.injection import control_file, write_fault
from inference.link import Answer, SupervisorState
from inference.notify import Notifier
from inference.policy import Backend, Phase, Reason
from inference.pose import initial_crop
from inference.status import CameraView, Identity, Sample, State, Tally, describe, one_line, state_of
from inference.tracking import Tracker

IDENTITY = Identity("movenet", "3", "/model", "npu", "virtual", ("/dev/simnpu0",), 0.5, 1, True, 25.0, "http://x/")


def supervision(backend: Backend = Backend.NPU, reason: Reason = Reason.OK) -> SupervisorState:
    return SupervisorState(
        phase=Phase.SERVING,
        backend=backend,
        reason=reason,
        frames=10,
        fallbacks=1,
        restarts=2,
        latency_ms={"p50": 4.0, "p95": 5.0, "p99": 6.0},
        first_invoke_done=True,
        heartbeat_monotonic=0.0,
        workers={},
        model={},
        scheduling="fifo",
        message="",
        remedy="",
        backends={Backend.NPU: {"soft_ms": 30.0, "hard_ms": 200.04}},
    )


def tally(*, answered: bool = True, last: bool = True, stopping: bool = False) -> Tally:
    value = Tally(last_was_answered=last, stopping=stopping)
    if answered:
        value.answered_at.append(1.0)
    return value


@pytest.mark.parametrize(
    ("backend", "connected", "count", "state"),
    [
        (Backend.NPU, True, tally(), State.SERVING),
        (Backend.CPU, True, tally(), State.DEGRADED),
        (Backend.NPU, True, tally(last=False), State.DEGRADED),
        (Backend.NPU, True, tally(answered=False), State.STARTING),
        (Backend.NPU, None, tally(answered=False), State.STARTING),
        (Backend.NPU, False, tally(), State.NO_CAMERA),
        (Backend.NPU, False, tally(stopping=True), State.STOPPING),
    ],
)
def test_the_state_is_what_a_person_would_say(
    backend: Backend, connected: bool | None, count: Tally, state: State
) -> None:
    camera = CameraView("replay:/x", connected)
    assert state_of(IDENTITY, supervision(backend), camera, count) is state


def test_the_document_has_every_key_of_the_interface() -> None:
    camera = CameraView("replay:/x", False, problem="cannot open camera replay:/x: gone")
    document = describe(IDENTITY, supervision(Backend.CPU, Reason.HUNG), camera, tally(), now=1.5)
    expected = "state backend reason required_backend model accelerator frames fallbacks restarts camera "
    expected += "first_invoke_done latency_ms fps page"
    assert set(expected.split()) <= set(document)
    assert document["accelerator"] == {
        "name": "virtual",
        "nodes": ["/dev/simnpu0"],
        "settle_s": 0.5,
        "contexts": 1,
    }
    assert document["fps"] == 0.5
    assert document["deadline_ms"] == {"soft": 30.0, "hard": 200.0}
    assert one_line(document) == "no camera: cannot open camera replay:/x: gone; movenet 3"
    seeing = describe(IDENTITY, supervision(Backend.CPU, Reason.HUNG), CameraView("x", True), tally(), now=1.5)
    assert one_line(seeing) == "degraded on cpu (hung), 0 fps, p95 5.0 ms; movenet 3"


class FakeLink:
    """Answers with one pose, records the crops, and refuses frames on request."""

    def __init__(self, pose: NDArray[np.float32]) -> None:
        self.pose = pose
        self.crops: list[NDArray[np.uint8]] = []
        self.refuse = False

    async def infer(self, crop: NDArray[np.uint8]) -> Answer:
        self.crops.append(crop)
        if self.refuse:
            raise InferenceError("cannot answer frame 1: no backend is left")
        return Answer(len(self.crops), self.pose, Backend.CPU, Reason.HUNG, 3.0, True)


class NoFrames:
    async def next_frame(self) -> Frame:
        raise AssertionError("the test hands frames over itself")


def standing_pose() -> NDArray[np.float32]:
    pose = np.full((17, 3), 0.5, np.float32)
    pose[:, 0] = np.linspace(0.3, 0.7, 17)
    pose[:, 2] = 0.9
    return pose


def test_the_crop_follows_the_person_and_points_are_pixels_of_the_frame() -> None:
    link = FakeLink(standing_pose())
    samples: list[Sample] = []
    count = Tally()
    tracker = Tracker(NoFrames(), link, 192, count, samples.append)
    frame = Frame(1, np.full((360, 640, 3), 200, np.uint8), 0.0)
    asyncio.run(tracker.answer(frame))
    asyncio.run(tracker.answer(frame))
    whole = initial_crop((640, 360))
    assert samples[0].points[0, 0] == pytest.approx(whole.y0 + 0.3 * whole.size, abs=0.5)
    # The first crop is the whole frame with black above and below; the second is inside the picture.
    assert link.crops[0][0, 0].tolist() == [0, 0, 0]
    assert link.crops[1].mean() > link.crops[0].mean()
    assert (samples[1].backend, samples[1].fell_back, len(count.answered_at)) == (Backend.CPU, True, 2)


def test_a_frame_without_an_answer_is_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    link = FakeLink(standing_pose())
    link.refuse = True
    count = Tally()
    tracker = Tracker(NoFrames(), link, 192, count, lambda _sample: None)
    frame = Frame(1, np.zeros((48, 64, 3), np.uint8), 0.0)
    for _ in range(3):
        asyncio.run(tracker.answer(frame))
    assert (count.unanswered, count.last_was_answered) == (3, False)
    assert [record.message for record in caplog.records] == ["cannot answer frame 1: no backend is left"]


def test_limbs_have_the_colour_of_the_backend() -> None:
    points = np.zeros((17, 3), np.float32)
    points[5], points[7] = (20, 10, 0.9), (20, 90, 0.9)  # left shoulder to left elbow
    for backend, dominant in ((Backend.NPU, 1), (Backend.CPU, 0)):
        sample = Sample(1, np.zeros((100, 100, 3), np.uint8), points, backend, Reason.OK, False, 1.0, 0.0)
        from inference.capture.source import decode_jpeg

        pixel = decode_jpeg(annotate(sample, 95), "drawing")[20, 50]
        assert int(pixel.argmax()) == dominant
        assert pixel[dominant] > 150


def test_systemd_is_told_over_its_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    monkeypatch.setenv("WATCHDOG_USEC", "3000000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        notifier = Notifier()
        notifier.send(READY=1, STATUS="serving\non npu")
        assert manager.recv(4096) == b"READY=1\nSTATUS=serving on npu"
    assert notifier.watchdog_s == 3.0
    notifier.send(WATCHDOG=1)  # the manager is gone: harmless
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert Notifier().watchdog_s is None


def test_an_event_reaches_the_journal_with_its_fields(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    handler = journal.JournalHandler(path)
    extra = journal.event(journal.BACKEND_CHANGED, BACKEND="cpu")
    record = logging.getLogger("x").makeRecord("x", logging.WARNING, "f", 1, "a\nb", (), None, extra=extra)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journald:
        journald.bind(path)
        handler.emit(record)
        entry = journald.recv(4096)
    handler.close()
    assert b"MESSAGE\n\x03\0\0\0\0\0\0\0a\nb\n" in entry
    assert b"PRIORITY=4\n" in entry
    assert f"MESSAGE_ID={journal.BACKEND_CHANGED}\n".encode() in entry
    assert b"BACKEND=cpu\n" in entry


def test_a_record_that_the_journal_does_not_take_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = journal.JournalHandler(str(tmp_path / "absent"))
    handler.emit(logging.getLogger("x").makeRecord("x", logging.ERROR, "f", 1, "lost %s", ("it",), None))
    handler.close()
    assert capsys.readouterr().err == "<3>lost it\n"


def test_faults_go_only_to_a_simulated_npu(tmp_path: Path) -> None:
    assert control_file(load_accelerator("virtual")) == Path("/run/avocado-pose/simnpu-control")
    assert control_file(load_accelerator("imx8mp-vx")) is None
    control = tmp_path / "control"
    write_fault(control, "slow")
    assert control.read_text() == "slow:100\n"
    write_fault(control, "slow:250")
    assert control.read_text() == "slow:250\n"
    for where, mode, message in (
        (None, "hang", "cannot inject hang: this board's accelerator profile is not a simulated NPU"),
        (control, "melt", "cannot inject melt: no such fault"),
        (control, "slow:0", "cannot inject slow:0: no such fault"),
    ):
        with pytest.raises(InferenceError) as caught:
            write_fault(where, mode)
        assert caught.value.message == message
    assert control.read_text() == "slow:250\n"

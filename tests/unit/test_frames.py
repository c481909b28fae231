"""The frame ring is writable by its maker alone, and records are what they were."""

from __future__ import annotations

import mmap
import os
import select

import pytest

from inference.frames import FRAME_BYTES, SLOTS, FrameRing
from inference.policy import Backend, Reason
from inference.processes import Pipes
from inference.records import POSE_BYTES, Ask, Kind, Reply, Token, WorkerPose, kind_of, pack_note, unpack_note

POSE = bytes(range(204))


def test_a_reader_sees_what_the_maker_writes() -> None:
    ring = FrameRing.create()
    reader = FrameRing.attach(os.dup(ring.fd))
    frame = os.urandom(FRAME_BYTES)
    ring.write(SLOTS - 1, frame)
    with reader.view(SLOTS - 1) as view:
        assert view == frame
        assert view.readonly
    reader.close()
    ring.close()


def test_nobody_else_can_write_or_resize_the_ring() -> None:
    ring = FrameRing.create()
    with pytest.raises(PermissionError):
        mmap.mmap(ring.fd, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(PermissionError):
        os.write(ring.fd, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(ring.fd, 0)
    ring.close()


def test_a_frame_of_another_size_is_refused() -> None:
    ring = FrameRing.create()
    with pytest.raises(ValueError, match="a frame has 110592 bytes, not 3"):
        ring.write(0, b"abc")
    ring.close()


@pytest.mark.parametrize(
    "record",
    [
        Token(Kind.GOLDEN, 7, 2**40, 3),
        WorkerPose(7, 2**40, 0.5, 1_500_000, POSE),
        Ask(7, 2**40),
        Reply(2**40, Backend.CPU, Reason.WRONG_RESULT, True, POSE),
    ],
    ids=lambda record: type(record).__name__,
)
def test_records_survive_their_bytes(record: Token | WorkerPose | Ask | Reply) -> None:
    raw = record.pack()
    assert type(record).unpack(raw) == record
    assert len(raw) <= select.PIPE_BUF
    assert len(POSE) == POSE_BYTES


def test_notes_survive_their_bytes() -> None:
    raw = pack_note({"stage": "ready", "oks_min": 0.9})
    assert kind_of(raw) is Kind.NOTE
    assert unpack_note(raw) == {"stage": "ready", "oks_min": 0.9}


def test_two_records_in_a_pipe_are_read_one_by_one() -> None:
    pipes = Pipes.open()
    for sequence in (1, 2):
        os.write(pipes.answers_out, WorkerPose(1, sequence, 0.0, 0, POSE).pack())
    assert [WorkerPose.unpack(os.read(pipes.answers_in, 4096)).sequence for _ in range(2)] == [1, 2]
    pipes.close_our_ends()
    pipes.close_worker_ends()

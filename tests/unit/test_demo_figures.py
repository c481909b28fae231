"""The demonstration's figures are those of the hang it made, not of a frame that was late by itself."""

from tests.device.demo import first_of_its_run, lost
from tests.device.poses import Seen


def seen(number: int, backend: str, reason: str = "ok") -> Seen:
    return Seen(at=float(number), sequence=number, backend=backend, reason=reason, latency_ms=1.0, points=[])


def test_a_late_frame_before_the_hang_is_not_taken_for_it() -> None:
    run = [seen(1, "npu"), seen(2, "cpu", "slow"), seen(3, "npu"), seen(4, "cpu", "slow"), seen(5, "cpu", "hung")]
    assert first_of_its_run(run, run[4]).sequence == 4


def test_a_frame_without_an_answer_is_counted() -> None:
    run = [seen(1, "npu"), seen(2, "npu"), seen(5, "cpu", "hung")]
    assert lost(run, 0, 10) == 2

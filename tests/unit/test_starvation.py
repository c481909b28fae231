"""Slow is not hung: what a worker could not use of its time does not count against it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from inference.records import Kind
from inference.starvation import Share, had_s, share_of
from inference.task import Task

BEFORE = Share(ran_s=1.0, queued_s=5.0, runnable=False)


@pytest.mark.parametrize(
    ("what", "after", "had"),
    [
        ("asleep in the driver all the time", Share(1.0, 5.0, False), 0.06),
        ("on a CPU all the time", Share(1.06, 5.0, True), 0.06),
        ("in the queue all the time", Share(1.0, 5.0, True), 0.0),
        ("half in the queue, half on a CPU", Share(1.03, 5.03, True), 0.03),
        ("a third in the queue, and asleep again", Share(1.0, 5.02, False), 0.04),
        ("an account that knows more than the clock", Share(1.1, 5.2, False), 0.0),
        ("no account", None, 0.06),
    ],
)
def test_time_in_the_queue_does_not_count(what: str, after: Share | None, had: float) -> None:
    assert had_s(BEFORE, after, 0.06) == pytest.approx(had), what


def test_the_kernel_keeps_book_of_a_process_that_sleeps() -> None:
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        before = share_of(process.pid)
        if before is None:
            pytest.skip("this kernel has no /proc/PID/schedstat")
        assert before.ran_s > 0
        process.kill()
    assert share_of(process.pid) is None
    assert share_of(os.getpid()) is not None


def test_a_process_without_an_account_has_had_all_its_time() -> None:
    task = Task.sent(Kind.FRAME, 1, now=10.0, soft_s=0.02, hard_s=0.08)
    gone = 2**22 + 1
    task.watch(gone, 10.02)
    assert not task.hung(gone, 10.079)
    assert task.hung(gone, 10.08)

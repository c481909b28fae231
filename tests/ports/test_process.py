"""The one door to other programs: bounded in time and output, and nothing is left running."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from agent.contract.errors import ErrorCode, OperationError
from agent.ports.process import Started, pass_through, run, run_checked


def test_both_streams_and_the_status_come_back() -> None:
    finished = run(["sh", "-c", "cat; echo words >&2; exit 3"], 10, stdin=b"x" * 300_000)
    assert (len(finished.stdout), finished.stderr, finished.status) == (300_000, b"words\n", 3)
    assert finished.last_words == "words"


def test_a_program_that_reads_nothing_does_not_block_its_input() -> None:
    assert run(["true"], 10, stdin=b"x" * 300_000).status == 0


def test_the_deadline_ends_the_whole_family(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    with pytest.raises(OperationError) as caught:
        run(["sh", "-c", f"sleep 60 & echo $! > {mark}; wait"], 0.5)
    assert caught.value.code is ErrorCode.STEP_TIMEOUT
    assert caught.value.message == "cannot run sh: not done after 0.5 s"
    assert _gone_within(int(mark.read_text()), 5)


def test_endless_output_is_cut_off() -> None:
    with pytest.raises(OperationError) as caught:
        run(["yes"], 10, max_output_bytes=100_000)
    assert caught.value.message == "cannot run yes: it wrote more than 100000 bytes"


def test_a_missing_program_and_a_failure_are_told_apart() -> None:
    with pytest.raises(OperationError) as missing:
        run(["no-such-program"], 10)
    assert (missing.value.code, missing.value.remedy) == (ErrorCode.TOOL_MISSING, "Install no-such-program.")
    with pytest.raises(OperationError) as failed:
        run_checked(["sh", "-c", "echo first; echo last >&2; exit 9"], 10, failure=ErrorCode.SWITCH_FAILED)
    assert (failed.value.code, failed.value.message) == (ErrorCode.SWITCH_FAILED, "cannot run sh: last")


def _gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":  # nobody reaps it where this test's init is no init
            return True
        time.sleep(0.02)
    return False


def test_a_program_started_ahead_waits_for_its_input_and_can_be_ended_unasked() -> None:
    started = Started(["cat"])
    assert started.is_waiting
    assert started.finish(10, stdin=b"late").stdout == b"late"
    assert not started.is_waiting
    unasked = Started(["cat"])
    unasked.end()
    assert not unasked.is_waiting
    unasked.end()


def test_a_program_on_the_caller_s_terminal_may_be_heard_and_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[bytes] = []
    line = ["sh", "-c", "echo out; echo one >&2; echo two >&2; exit 7"]
    assert pass_through(line, heard.append) == 7
    assert heard == [b"one\n", b"two\n"]
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("out\n", "one\ntwo\n")
    with pytest.raises(OperationError) as caught:
        pass_through(["no-such-program"], heard.append)
    assert caught.value.code is ErrorCode.TOOL_MISSING

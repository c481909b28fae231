"""Every misbehaviour of the simulated NPU.

What may hang, spin or take its process down runs in a child with a deadline.
"""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from inference import litert
from tests.inference.simnpu import Child, on_npu
from tests.networks import SIDE, pictures


@pytest.fixture
def child(library: Path, model: Path) -> Iterator:
    started: list[Child] = []

    def start(**options: str) -> Child:
        started.append(Child(library, model, **options))
        return started[-1]

    yield start
    for one in started:
        one.__exit__()


def test_without_a_fault_it_answers_every_frame(child):
    lines = child().finish()
    assert lines[:2] == ["created", "loaded"]
    assert len(lines) == 5


def still_there(one: Child, seconds: float = 0.4) -> bool:
    try:
        one.process.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


@pytest.mark.parametrize(
    ("options", "last_word"),
    [
        ({"mode": "hang"}, "loaded"),
        ({"hang_at": "3"}, "frame 2"),
        ({"fail": "prepare_hang"}, "created"),
    ],
    ids=["at the first frame", "at the third frame", "while preparing"],
)
def test_a_hang_lasts_until_the_process_is_killed(child, options, last_word):
    one = child(**options)
    one.wait_for(last_word)
    assert still_there(one)
    one.process.kill()
    assert one.process.wait(5) == -signal.SIGKILL
    assert one.lines[-1].startswith(last_word)


def test_a_hang_at_create_comes_before_anything_is_loaded(child, tmp_path):
    log = tmp_path / "log"
    one = child(fail="create_hang", log=str(log))
    until(lambda: log.exists() and "hang at create" in log.read_text())
    assert still_there(one)
    one.process.kill()
    assert one.finish() == []


def test_a_spin_burns_the_processor_until_it_is_killed(child):
    one = child(mode="spin")
    one.wait_for("loaded")
    begun = one.cpu_seconds()
    until(lambda: one.cpu_seconds() - begun > 0.3)
    assert one.process.poll() is None


def until(condition, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def test_slow_delays_each_frame_once(child):
    lines = child(mode="slow:150", ops="CONV_2D").finish()
    times = [int(line.split()[2]) for line in lines if line.startswith("frame")]
    assert len(times) == 3
    assert all(150 <= ms < 300 for ms in times), times


def test_an_error_is_an_exception_and_not_the_end(child):
    assert child(mode="error").finish() == [
        "created",
        "loaded",
        "RuntimeError: simnpu: the graph returned -1 (simulated)Node number 10 (SimulatedNpu) failed to invoke.",
    ]


def test_a_wrong_result_looks_like_a_good_one_but_is_another(child):
    right, wrong = child().finish(), child(mode="wrong").finish()
    assert len(wrong) == len(right) == 5
    assert all(a.split()[4] != b.split()[4] for a, b in zip(right[2:], wrong[2:], strict=True))


@pytest.mark.parametrize(("mode", "number"), [("crash", signal.SIGSEGV), ("abort", signal.SIGABRT)])
def test_a_crash_takes_its_process_down(child, mode, number):
    one = child(mode=mode)
    one.wait_for("loaded")
    assert one.process.wait(15) == -number


@pytest.mark.parametrize(
    ("fail", "lines"),
    [
        (
            "create",
            ["DelegateRefusedError: cannot create delegate .* simnpu: the device did not answer \\(simulated\\)"],
        ),
        ("busy", ["DelegateRefusedError: .* simnpu: cannot get a context: Device or resource busy \\(simulated\\)"]),
        (
            "prepare",
            ["created", "DelegateRefusedError: cannot prepare .*simnpu: the graph was refused \\(simulated\\).*"],
        ),
    ],
)
def test_a_refusal_says_what_was_refused_and_leaves_the_process_alive(child, fail, lines):
    one = child(fail=fail)
    got = one.finish()
    assert len(got) == len(lines)
    assert all(re.fullmatch(pattern, line) for pattern, line in zip(lines, got, strict=True)), got
    assert one.process.returncode == 0


def test_the_control_file_changes_the_mode_while_it_runs(library, model, tmp_path):
    control = tmp_path / "control"
    npu = on_npu(library, model, SIDE, ("scores",), control=str(control))
    frame = pictures(1)[0][None]
    good = npu.infer(frame)["scores"]
    control.write_text("error\n")
    with pytest.raises(RuntimeError, match="the graph returned -1"):
        npu.infer(frame)
    control.write_text("wrong")
    assert not np.array_equal(npu.infer(frame)["scores"], good)
    control.write_text("")
    np.testing.assert_array_equal(npu.infer(frame)["scores"], good)
    control.write_text("create")
    with pytest.raises(litert.DelegateRefusedError):
        litert.create_delegate(str(library), {"control": str(control)})

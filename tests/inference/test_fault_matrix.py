"""Each fault wherever it can occur, twice in a row while the NPU recovers: `make fault-matrix` prints what happened.

After each one: every frame was answered, with the reason on the link, on the bus and in the log (which the journal
gets); the NPU is back; no process and no descriptor is left. Times are printed, never asserted.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from inference.link import SupervisorLink
from inference.policy import Backend, Reason
from tests.bus.private_bus import private_bus
from tests.inference.listener import Listener, listening
from tests.inference.rig import ROOT, Camera, Rig, no_process_left, open_descriptors


class Stage(StrEnum):
    """Where the fault meets the worker."""

    CREATE = "create"
    PREPARE = "prepare"
    FIRST_INVOKE = "first invoke"
    STEADY = "steady state"
    SELF_TEST = "self-test"


@dataclass(frozen=True)
class Cell:
    """One fault at one stage."""

    fault: str
    stage: Stage
    mode: str
    reason: Reason
    changes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.fault} at {self.stage}"


@dataclass(frozen=True)
class Outcome:
    """What a cell did; times in milliseconds."""

    cell: Cell
    frames: int
    wrong: int
    worst_ms: float
    workers: int
    back_ms: float

    def row(self) -> str:
        cell = self.cell
        answered = f"{self.frames} of {self.frames}"
        return (
            f"{cell.fault:22}{cell.stage:14}{cell.reason:14}{answered:>12}{self.wrong:>8}"
            f"{self.worst_ms:>10.0f}{self.workers:>9}{self.back_ms:>9.0f}"
        )


HEADER = (
    f"{'fault':22}{'stage':14}{'reason':14}{'answered':>12}{'wrong':>8}{'worst ms':>10}{'workers':>9}{'back ms':>9}"
)
LOAD = {"deadlines": {"create_s": 0.8, "prepare_s": 0.8}}
FIRST = {"deadlines": {"first_invoke_s": 1.0}}
# No frame and no periodic test: the self-test alone meets the fault.
ALONE = {"recovery": {"golden_every_s": 60}}

HUNG, CRASHED = Reason.HUNG, Reason.CRASHED
AT_INVOKE = [
    ("hang", "hang", HUNG),
    ("spin", "spin", HUNG),
    ("far too slow", "slow:2500", HUNG),
    ("error", "error", Reason.ERROR),
    ("wrong result", "wrong", Reason.WRONG_RESULT),
    ("crash", "crash", CRASHED),
    ("abort", "abort", CRASHED),
]
CELLS = [
    Cell("refused", Stage.CREATE, "create", Reason.REFUSED, LOAD),
    Cell("device busy", Stage.CREATE, "busy", Reason.BUSY, LOAD),
    Cell("device gone", Stage.CREATE, "gone", Reason.DEVICE_GONE, LOAD),
    Cell("hang", Stage.CREATE, "create_hang", HUNG, LOAD),
    Cell("refused", Stage.PREPARE, "prepare", Reason.REFUSED, LOAD),
    Cell("hang", Stage.PREPARE, "prepare_hang", HUNG, LOAD),
    *(Cell(fault, Stage.FIRST_INVOKE, mode, reason, FIRST) for fault, mode, reason in AT_INVOKE),
    *(Cell(fault, Stage.STEADY, mode, reason) for fault, mode, reason in AT_INVOKE),
    Cell("slow", Stage.STEADY, "slow:120", Reason.SLOW),
    Cell("device gone", Stage.STEADY, "gone", Reason.DEVICE_GONE),
    Cell("killed from outside", Stage.STEADY, "kill", CRASHED),
    *(Cell(fault, Stage.SELF_TEST, mode, reason, ALONE) for fault, mode, reason in AT_INVOKE),
]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The table, printed at the end and kept in build/fault-matrix.txt."""
    rows: list[str] = []
    yield rows
    report = Path(ROOT / "build" / "fault-matrix.txt")
    report.parent.mkdir(exist_ok=True)
    report.write_text("\n".join([HEADER, *rows]) + "\n")
    plugins = request.config.pluginmanager
    terminal, capturing = plugins.get_plugin("terminalreporter"), plugins.get_plugin("capturemanager")
    if terminal is not None and capturing is not None:
        with capturing.global_and_fixture_disabled():
            terminal.ensure_newline()
            for row in (HEADER, *rows):
                terminal.write_line(row)


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with private_bus(tmp_path_factory.mktemp("bus")) as address:
        yield address


def begin(rig: Rig, link: SupervisorLink, cell: Cell) -> None:
    """Make the fault happen at its stage."""
    if cell.mode == "gone":
        rig.node.unlink()
    elif cell.mode != "kill":
        rig.inject(cell.mode)
    if cell.mode == "gone" and cell.stage is Stage.STEADY:
        # A driver whose device was unplugged fails its calls.
        rig.inject("error")
    if cell.mode == "kill" or cell.stage in (Stage.CREATE, Stage.PREPARE, Stage.FIRST_INVOKE):
        # A fresh worker goes through every stage; the one before it must not meet the fault first.
        os.kill(link.state.workers["npu"], signal.SIGKILL)


def end(rig: Rig) -> None:
    """Make the device well again."""
    rig.node.touch()
    rig.inject("ok")


async def met(link: SupervisorLink, camera: Camera, listener: Listener, cell: Cell) -> None:
    """Frames until the fault has been told with its reason, and met by two workers in a row where it persists."""
    if cell.stage is Stage.SELF_TEST:
        tested = await link.self_test()
        assert (tested.passed, tested.backend, tested.reason) == (False, Backend.NPU, cell.reason)
    restarts = link.state.restarts
    fallen = await camera.until(lambda answer: answer.backend is Backend.CPU and answer.reason is cell.reason)
    assert fallen.fell_back
    if cell.reason is Reason.SLOW:
        assert link.state.restarts == restarts, "a fresh worker may have to compile: a slow one is kept"
    elif cell.mode != "kill" and cell.stage is not Stage.SELF_TEST:
        await camera.until(lambda _: link.state.restarts >= restarts + 2)
    await camera.until(lambda _: listener.heard(cell.reason))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_fault_is_answered_by_the_cpu_told_and_survived(
    rig: Rig,
    cell: Cell,
    bus: str,
    outcomes: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", bus)

    async def scenario() -> Outcome:
        async with rig.running(**cell.changes) as link, listening(link, bus) as listener:
            camera = Camera(link)
            await camera.until(lambda answer: answer.backend is Backend.NPU)
            descriptors, workers = open_descriptors(link.pid), link.state.restarts
            begin(rig, link, cell)
            await met(link, camera, listener, cell)
            await camera.until(lambda _: cell.reason in {getattr(record, "REASON", None) for record in caplog.records})
            end(rig)
            since = time.monotonic()
            answer = await camera.until(lambda answer: answer.backend is Backend.NPU)
            assert (answer.reason, answer.fell_back) == (Reason.OK, False)
            await camera.until(lambda _: listener.switches[-1] == (Backend.CPU, Backend.NPU, Reason.OK))
            back_ms = (time.monotonic() - since) * 1000
            await camera.until(lambda _: open_descriptors(link.pid) == descriptors)
            wrong = sum(camera.oks(answer) < 0.9 for answer in camera.answers)
            # Between two golden frames nobody can know that the NPU lies.
            assert wrong == 0 or cell.mode == "wrong"
            worst_ms = max(answer.latency_ms for answer in camera.answers)
            return Outcome(cell, len(camera.answers), wrong, worst_ms, link.state.restarts - workers, back_ms)

    outcomes.append(asyncio.run(scenario()).row())


def test_a_long_first_compile_is_waited_for_while_the_cpu_serves(rig: Rig, outcomes: list[str]) -> None:
    async def scenario() -> Outcome:
        # Twelve times the hard deadline of a frame.
        async with rig.running(wait=False, options={"warmup_ms": "3000"}) as link:
            camera = Camera(link)
            first = await camera.until(lambda answer: answer.backend is Backend.CPU)
            assert first.reason is Reason.STARTING
            assert not link.state.first_invoke_done
            since = time.monotonic()
            await camera.until(lambda answer: answer.backend is Backend.NPU)
            back_ms = (time.monotonic() - since) * 1000
            await link.next_state()
            assert link.state.first_invoke_done
            assert link.state.restarts == 0
            assert link.state.backends["npu"]["first_invoke_ms"] > 3000
            worst_ms = max(answer.latency_ms for answer in camera.answers)
            cell = Cell("long compile", Stage.FIRST_INVOKE, "", Reason.STARTING)
            return Outcome(cell, len(camera.answers), 0, worst_ms, 0, back_ms)

    outcomes.append(asyncio.run(scenario()).row())


def test_a_worker_that_cannot_be_killed_is_quarantined_and_the_npu_not_given_to_another(
    rig: Rig, outcomes: list[str]
) -> None:
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("needs root and /dev/fuse to make a process that SIGKILL does not end")
    folder = rig.folder / "stuck"
    folder.mkdir()
    command = ["unshare", "--mount", sys.executable, "-m", "tests.inference.unkillable", str(folder)]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=50, check=True)
    seen = json.loads(ended.stdout)
    assert seen.pop("least_oks") > 0.9
    frames, worst_ms, back_ms = (seen.pop(key) for key in ("frames", "worst_ms", "back_ms"))
    expected = {"backend": "cpu", "quarantined": True, "stuck": ["D"], "more_workers": 0, "back": "serving"}
    assert seen == expected
    asyncio.run(no_process_left())
    cell = Cell("unkillable", Stage.CREATE, "", Reason.QUARANTINED)
    outcomes.append(Outcome(cell, frames, 0, worst_ms, 1, back_ms).row())

"""What the engine says and keeps while it runs, and when it is cancelled, interrupted or out of disk."""

from __future__ import annotations

import logging

import pytest

from agent.change.engine import Engine
from agent.change.record import ChangeRecord, NewChange, Outcome, Phase
from agent.change.step import Shutdown
from agent.contract.errors import ErrorCode, OperationError
from tests.change.fakes import FakeClock
from tests.change.stories import R0, R1, R2, board, deploy
from tests.change.wired import change_on, engine_on, run
from tests.change.world import World


def test_a_deploy_ends_applied_with_its_figures() -> None:
    world = board(R1, previous=R0)
    record = run(world, deploy(R2)())
    assert (record.outcome, record.committed, record.reason) == (Outcome.APPLIED, True, None)
    assert [step.phase for step in record.steps] == [Phase.DONE] * 11
    assert (record.facts["image_bytes"], record.facts["moved_bytes"]) == (2000, 200)
    assert {image["name"]: image["way"] for image in record.facts["images"]} == {
        "pose-config": "delta",
        "pose-model": "delta",
        "pose-app": "held",
        "npu-virtual": "held",
        "avocado-agent": "held",
    }
    assert record.facts["backend"] == "npu"
    assert 0.2 <= record.facts["away_s"] < 1
    assert set(record.facts["took_s"]) == {step.kind for step in record.steps}
    assert record.facts["took_s"]["release_npu"] == 0.2
    assert record.facts["npu"] == {"nodes": ["/dev/simnpu0"], "settle_s": 0.2, "contexts": 1}


def test_a_clean_up_that_fails_after_the_commit_is_a_warning() -> None:
    world = board(R1, previous=R0)
    world.fail_when = lambda call, w: (
        OperationError(ErrorCode.INTERNAL, "cannot remove it") if call[0] == "remove_image" else None
    )
    record = run(world, deploy(R2)())
    assert (record.outcome, record.reason) == (Outcome.APPLIED, None)
    assert record.steps[-1].warning == "cannot remove it"


def test_progress_carries_bytes_and_whole_records() -> None:
    world = board(R1)
    seen: list[ChangeRecord] = []
    engine_on(world).run(change_on(world, deploy(R2)()), seen.append, lambda: False)
    figures = [(r.facts["bytes_done"], r.facts["bytes_total"]) for r in seen if "bytes_done" in r.facts]
    assert figures[0] == (0, 200)
    assert (200, 200) in figures
    assert [r.outcome for r in seen][-1] is Outcome.APPLIED
    assert {r.step.kind for r in seen if r.step} == {step.kind for step in seen[-1].steps}


def test_a_cancelled_fetch_stops_in_the_middle() -> None:
    world = board(R1)
    answers = iter([False, False, True] + [True] * 50)
    record = engine_on(world).run(change_on(world, deploy(R2)()), lambda _: None, lambda: next(answers))
    assert record.outcome is Outcome.CANCELLED
    assert record.reason
    assert record.reason.message == "cannot finish change 1: it was cancelled"
    assert not [call for call in world.calls if call[0] in ("stage", "stop")]


def test_a_change_that_waits_for_its_host_is_cancelled_at_once() -> None:
    world = board(R1, previous=R0)
    world.host_comes_back = False
    engine = engine_on(world)
    cancelled: list[str] = []

    def watch(record: ChangeRecord) -> None:
        if record.step and record.step.kind == "await_confirmation" and engine.cancellable(record):
            cancelled.append(record.step.phase)

    began_s = world.now_s
    record = engine.run(change_on(world, deploy(R2)()), watch, lambda: bool(cancelled))
    assert record.outcome is Outcome.CANCELLED
    assert record.reason
    assert record.reason.message == "cannot finish change 1: it was cancelled"
    assert (world.active, world.previous, world.running["pose.service"][0]) == (R1.id, R0.id, R1.id)
    assert world.now_s - began_s < 10


def test_a_change_can_be_cancelled_until_the_switch_begins_and_while_it_waits_for_its_host() -> None:
    world = board(R1)
    engine = engine_on(world)
    answers: dict[str, bool] = {}

    def watch(record: ChangeRecord) -> None:
        if record.step and record.step.phase is Phase.DOING:
            answers[record.step.kind] = engine.cancellable(record)

    engine.run(change_on(world, deploy(R2)()), watch, lambda: False)
    assert [kind for kind, may in answers.items() if may] == [
        "fetch_images",
        "stage_runtime",
        "stop_services",
        "release_npu",
        "await_confirmation",
    ]


def test_a_shutdown_leaves_the_journal_and_the_next_start_decides() -> None:
    world = board(R1)

    def stop(call: tuple, w: World) -> None:
        if call[0] == "self_test" and w.records[1].attempts == 0:
            raise Shutdown

    world.fail_when = stop
    with pytest.raises(Shutdown):
        run(world, deploy(R2)())
    assert world.records[1].outcome is Outcome.RUNNING
    record = engine_on(world).recover(lambda _: None)
    assert record
    assert record.reason
    assert (record.outcome, record.reason.code) == (Outcome.REVERTED, ErrorCode.CHANGE_REVERTED)
    assert world.running["pose.service"][0] == R1.id


def test_a_bug_in_a_step_reverts_like_any_failure(caplog: pytest.LogCaptureFixture) -> None:
    world = board(R1)

    def bug(call: tuple, w: World) -> None:
        if call == ("show", R2.id):
            raise KeyError("oops")

    world.fail_when = bug
    record = run(world, deploy(R2)())
    assert record.reason
    assert (record.outcome, record.reason.message) == (
        Outcome.REVERTED,
        "cannot finish step switch_overlay: KeyError('oops')",
    )
    assert "Traceback" in caplog.text


def test_one_line_closes_each_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run(board(R1), deploy(R2)())
    closing = caplog.records[-1]
    assert closing.getMessage() == (
        "change 1 (deploy) applied: 200 of 2000 bytes moved, services away for 0.40 s, back on the npu"
    )
    assert (closing.CHANGE_ID, len(closing.MESSAGE_ID)) == ("1", 32)


def test_nothing_is_recovered_when_nothing_ran() -> None:
    world = board(R1)
    assert engine_on(world).recover(lambda _: None) is None
    run(world, deploy(R2)())
    assert engine_on(world).recover(lambda _: None) is None


def test_a_journal_that_takes_nothing_begins_nothing() -> None:
    world = board(R1)
    full = OperationError(ErrorCode.NO_SPACE, "cannot write: full")
    world.fail_when = lambda call, w: full if call[0] == "journal" else None
    with pytest.raises(OperationError, match="cannot write: full"):
        run(world, deploy(R2)())
    assert world.calls == [("journal", None, None)]


def test_an_engine_needs_no_step_by_name() -> None:
    world = board(R1)
    record = Engine(NoJournal(), {}, FakeClock(world)).run(
        NewChange("refresh", "root", None, None, ()), lambda _: None, lambda: False
    )
    assert record.outcome is Outcome.APPLIED


class NoJournal:
    def next_number(self) -> int:
        return 1

    def save(self, record: ChangeRecord) -> None:
        pass

    def newest(self) -> ChangeRecord | None:
        return None

    def prune(self) -> None:
        pass

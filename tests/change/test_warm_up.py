"""A model is tried before anything is stopped for it: what passes, what is refused, and what is no verdict."""

from __future__ import annotations

import pytest

from agent.change.record import ChangeRecord, Outcome, Phase
from agent.change.steps.warm_up import TRY_TIMEOUT_S
from agent.contract.errors import ErrorCode, OperationError
from agent.plan import Wanted
from tests.change.stories import R0, R1, R2, R3, board, deploy, deploy_warmed_up, sharing
from tests.change.wired import change_on, engine_on, run
from tests.change.world import World

ON_TRIAL = ("try", R2.id, "npu")
ON_CPU = ("try", R2.id, "cpu")


def warmed_up(world: World, wanted: Wanted | None = None) -> ChangeRecord:
    return run(world, wanted or deploy_warmed_up(R2)())


def warning(record: ChangeRecord) -> str:
    return next(step.warning for step in record.steps if step.kind == "warm_up")


def test_a_good_model_passes_between_its_staging_and_the_first_stop() -> None:
    world = sharing(board(R1, previous=R0))
    record = warmed_up(world)
    assert (record.outcome, warning(record)) == (Outcome.APPLIED, "")
    assert record.facts["warm_up"] == {"backend": "npu", "oks": 0.99, "first_invoke_ms": 12.0}
    effects = [call for call in world.calls if call[0] in ("check", "try", "stop")]
    assert effects == [("check", R2.id), ON_TRIAL, ("stop", "pose.service")]


def test_without_being_asked_nothing_is_tried() -> None:
    world = sharing(board(R1))
    run(world, deploy(R2)())
    assert "try" not in {call[0] for call in world.calls}


def test_a_bad_model_is_refused_while_the_old_one_serves() -> None:
    world = sharing(board(R1, previous=R0))
    serving = dict(world.running)
    world.bad = {R2.id: "wrong-result"}
    record = warmed_up(world)
    assert record.outcome is Outcome.REVERTED
    assert record.reason
    assert (record.reason.code, record.reason.message) == (
        ErrorCode.UNHEALTHY,
        "cannot warm up model movenet 2: its golden frame has OKS 0.31",
    )
    assert record.reason.remedy == "See what it said: journalctl -b -n 50 -u avocado-warm-up"
    assert (world.running, "stop" in {call[0] for call in world.calls}) == (serving, False)
    assert R2.id not in world.runtimes


def test_an_npu_with_one_context_is_the_serving_model_s_and_the_cpu_is_tried() -> None:
    world = board(R1)
    record = warmed_up(world)
    assert (record.outcome, warning(record)) == (Outcome.APPLIED, "not tried on the NPU: it grants one context")
    assert record.facts["warm_up"]["backend"] == "cpu"
    assert [call for call in world.calls if call[0] == "try"] == [ON_CPU]


def test_an_npu_that_fails_the_serving_model_judges_no_other() -> None:
    world = sharing(board(R1))
    world.bad = {R1.id: "cpu"}
    record = warmed_up(world)
    why = "not tried on the NPU: the model that serves does not run on it either"
    assert (record.outcome, warning(record)) == (Outcome.APPLIED, why)
    assert [call for call in world.calls if call[0] == "try"] == [ON_CPU]


def test_an_npu_whose_other_context_somebody_holds_is_left_to_them_and_the_cpu_is_tried() -> None:
    world = sharing(board(R1))
    world.npu_is_busy = True
    record = warmed_up(world)
    assert (record.outcome, warning(record)) == (Outcome.APPLIED, "not tried on the NPU: it grants 2 contexts")
    assert [call for call in world.calls if call[0] == "try"] == [ON_TRIAL, ON_CPU]


def test_a_board_that_cannot_try_goes_on_with_a_warning() -> None:
    world = sharing(board(R1))
    refusal = OperationError(ErrorCode.UNSUPPORTED, "cannot show a set to one process alone: kernel 6.1")
    world.fail_when = lambda call, _: refusal if call[0] == "try" else None
    record = warmed_up(world)
    assert (record.outcome, warning(record)) == (Outcome.APPLIED, f"not tried: {refusal.message}")
    assert "warm_up" not in record.facts


def test_a_model_that_gives_no_answer_is_refused_at_the_deadline() -> None:
    world = sharing(board(R1))
    world.trial_takes_s = TRY_TIMEOUT_S + 60
    record = warmed_up(world)
    assert record.reason
    assert record.reason.message == "cannot warm up the new model: it gave no answer within 600 s"
    assert (record.outcome, world.tried) == (Outcome.REVERTED, None)
    assert world.now_s < 1000 + TRY_TIMEOUT_S + 5


def test_a_trial_ends_when_the_change_is_cancelled() -> None:
    world = sharing(board(R1))
    world.trial_takes_s = 60
    change = change_on(world, deploy_warmed_up(R2)())
    record = engine_on(world).run(change, lambda _: None, lambda: world.tried is not None and world.now_s > 1010)
    assert (record.outcome, world.tried) == (Outcome.CANCELLED, None)
    assert world.now_s < 1015
    assert world.active == R1.id


def test_a_trial_that_cannot_be_ended_is_a_warning_and_nothing_is_stuck() -> None:
    world = sharing(board(R1))
    world.bad = {R2.id: "wrong-result"}
    error = OperationError(ErrorCode.UNIT_FAILED, "cannot stop it")
    world.fail_when = lambda call, _: error if call[0] == "end_try" else None
    record = warmed_up(world)
    assert (record.outcome, warning(record)) == (Outcome.REVERTED, "while going back: cannot stop it")


@pytest.mark.parametrize("owned", ["", "pose.service"])
def test_an_extension_that_comes_anew_is_tried_where_its_image_concerns_the_pose_service(owned: str) -> None:
    """What it owns is read only when it is there; the plan cannot know."""
    new = next(extension for extension in R3.extensions if extension.name == "avocado-agent")
    without = R3.model_copy(update={"extensions": [e for e in R3.extensions if e is not new], "id": R1.id})
    world = sharing(board(without))
    world.images -= {new.image_id}
    keys = {kind: dict(found) for kind, found in world.releases[new.image_id].items()}
    for found in keys.values():
        found["AVOCADO_ENABLE_SERVICES"] = owned
    world.releases = world.releases | {new.image_id: keys}
    record = warmed_up(world, deploy_warmed_up(R3)())
    assert record.outcome is Outcome.APPLIED
    step = next(step for step in record.steps if step.kind == "warm_up")
    assert (step.phase, step.memo) == (Phase.DONE, {"concerned": bool(owned)})
    assert any(call[0] == "try" for call in world.calls) is bool(owned)

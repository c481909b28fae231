"""Which services a change stops and starts, in which order, and whose failure counts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from agent.change.record import NewChange, Outcome
from agent.change.steps.stop_services import all_of
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.local import disable
from agent.plan import Bystanders, ChangeKind, Wanted, plan_change
from tests.change.sets import releases, runtime
from tests.change.stories import R0, R1, R2, R3, board, deploy, watched
from tests.change.wired import change_on, engine_on, observe, run
from tests.change.world import Call, World


def test_a_deploy_touches_the_services_in_this_order() -> None:
    world = board(R1)
    run(world, deploy(R2)())
    effects = [
        call
        for call in world.calls
        if call[0] not in ("journal", "release", "require_reload", "self_test", "holders", "fetch")
    ]
    assert effects == [
        ("index",),
        ("stage", R2.id),
        ("check", R2.id),
        ("stop", "pose.service"),
        ("show", R2.id),
        ("reload_manager",),
        ("start", "pose.service"),
        ("activate", R2.id),
        ("sync_links",),
        ("settle",),
    ]


def test_a_service_of_the_base_that_runs_from_an_image_stops_first_and_starts_last() -> None:
    world = watched(board(R1, previous=R0))
    world.offered = R2
    record = run(world, deploy(R2)())
    assert record.outcome is Outcome.APPLIED
    moves = [call for call in world.calls if call[0] in ("start", "stop")]
    assert moves == [
        ("stop", "viewer.service"),
        ("stop", "pose.service"),
        ("start", "pose.service"),
        ("start", "viewer.service"),
    ]


def test_a_model_alone_does_not_reload_systemd_and_an_undo_does_not_either() -> None:
    for bad in ("", "cpu"):
        world = board(R2)
        only_the_model = runtime("4", pose_model="4", pose_config="2")
        world.releases = {
            image: {kind: keys | {"EXTENSION_RELOAD_MANAGER": "0"} for kind, keys in kinds.items()}
            for image, kinds in releases(R2, only_the_model).items()
        }
        world.bad = {only_the_model.id: bad}
        record = run(world, deploy(only_the_model)())
        assert record.outcome is (Outcome.REVERTED if bad else Outcome.APPLIED)
        assert ("reload_manager",) not in world.calls


def test_modules_are_loaded_when_their_extension_comes() -> None:
    world = board(None)
    run(world, deploy(R1)())
    assert ("run", "/usr/sbin/modprobe", "--", "simnpu") in world.calls


def test_the_agents_own_extension_stops_nobody() -> None:
    world = board(R1)
    record = run(world, deploy(R3)())
    assert record.outcome is Outcome.APPLIED
    assert not [call for call in world.calls if call[0] in ("stop", "start")]
    assert world.running["pose.service"] == (R1.id, 0.0)


@pytest.mark.parametrize("bad", ["", "cpu"])
def test_a_bystander_that_fails_is_a_warning_and_no_reason_to_go_back_or_to_be_stuck(bad: str) -> None:
    world = watched(board(R1, previous=R0))
    world.bad = {R2.id: bad}
    world.fail_when = lambda call, _: (
        OperationError(ErrorCode.UNIT_FAILED, f"cannot {call[0]} viewer.service")
        if call in (("start", "viewer.service"), ("stop", "viewer.service"))
        else None
    )
    record = run(world, deploy(R2)())
    assert record.outcome is (Outcome.REVERTED if bad else Outcome.APPLIED)
    assert {step.kind: step.warning.split("; ") for step in record.steps if step.warning} == {
        "stop_services": ["cannot stop viewer.service"]
        + (["while going back: cannot start viewer.service"] if bad else []),
        "start_services": ["cannot start viewer.service"]
        + (["while going back: cannot stop viewer.service"] if bad else []),
    }


def test_a_bystander_that_ends_by_itself_has_nothing_to_prove() -> None:
    world = watched(board(R1, previous=R0))
    world.brief = {"viewer.service"}
    assert run(world, deploy(R2)()).outcome is Outcome.APPLIED


def test_a_job_is_left_alone_and_named() -> None:
    world = board(R1)
    others = Bystanders(jobs=("backup.service",))
    steps = plan_change(replace(observe(world), bystanders=others), Wanted(ChangeKind.REFRESH, None))
    record = engine_on(world).run(NewChange("refresh", "root", R1.id, R1.id, steps), lambda _: None, lambda: False)
    assert [step.warning for step in record.steps if step.warning] == [
        "backup.service runs from an image that leaves; it is a job that ends by itself, and is left alone"
    ]
    assert not [call for call in world.calls if "backup.service" in call]


def test_a_service_stopped_by_somebody_stays_stopped() -> None:
    world = board(R1)
    world.running = {}
    record = run(world, deploy(R2)())
    assert (record.outcome, world.running) == (Outcome.APPLIED, {})


def test_a_unit_that_was_left_out_here_is_not_started() -> None:
    without_app = disable(R1, "pose-app")
    world = board(without_app)
    world.running, world.missing = {}, {"pose.service"}
    record = run(world, Wanted(ChangeKind.REFRESH, None))
    assert (record.outcome, record.reason, world.running) == (Outcome.APPLIED, None, {})


def test_a_service_stopped_after_the_plan_was_made_stays_stopped() -> None:
    world = board(R1)
    change = change_on(world, deploy(R2)())
    world.running = {}
    record = engine_on(world).run(change, lambda _: None, lambda: False)
    assert (record.outcome, world.running) == (Outcome.APPLIED, {})


def test_after_a_stuck_change_a_stopped_service_is_no_wish() -> None:
    world = board(R1)
    steps = plan_change(replace(observe(world), after_stuck=True), Wanted(ChangeKind.REFRESH, None))
    world.running = {}
    engine_on(world).run(NewChange("refresh", "root", R1.id, R1.id, steps), lambda _: None, lambda: False)
    assert set(world.running) == {"pose.service"}


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("bad", ["", "cpu"])
def test_a_masked_service_is_never_started(runs: bool, bad: str) -> None:
    world = watched(board(R1, previous=R0))
    world.masked = {"pose.service", "viewer.service"}
    world.bad = {R2.id: bad}
    if not runs:
        world.running = {}
    record = run(world, deploy(R2)())
    assert (record.outcome, world.running) == (Outcome.APPLIED, {})
    assert not [call for call in world.calls if call[0] == "start"]


def test_a_clean_up_that_fails_while_going_back_keeps_no_service_stopped() -> None:
    ran: list[str] = []
    failing = {"first"}

    def work(name: str) -> None:
        ran.append(name)
        if name in failing:
            raise OperationError(ErrorCode.UNIT_FAILED, f"cannot run {name}")

    with pytest.raises(OperationError) as caught:
        all_of([partial(work, name) for name in ("first", "second", "third")])
    assert ran == ["first", "second", "third"]
    assert caught.value.message == "cannot run first"


def test_what_somebody_masks_during_the_trial_keeps_no_change_from_going_back() -> None:
    def mask(call: Call, world: World) -> OperationError | None:
        if call == ("show", R2.id):
            world.masked.add("pose.service")
        return OperationError(ErrorCode.SWITCH_FAILED, "cannot switch") if call == ("show", R2.id) else None

    world = board(R1)
    world.fail_when = mask
    record = run(world, deploy(R2)())
    assert (record.outcome, world.active, world.shown["sysext"]) == (Outcome.REVERTED, R1.id, R1.id)
    stop = next(step for step in record.steps if step.kind == "stop_services")
    assert stop.warning == "while going back: pose.service was masked meanwhile, and stays stopped"

"""A change that another agent began, with a step that this one does not know."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from agent.change.record import ChangeRecord, Outcome, Phase, parse_record
from agent.contract.errors import ErrorCode
from agent.contract.manifest import Manifest
from tests.change.stories import R0, R1, R2, board, deploy
from tests.change.wired import engine_on, run
from tests.change.world import World

UNKNOWN = "cannot go on with change 1: this agent does not know the step polish"


def interrupted(active: Manifest, at: int, phase: Phase, *, volatile: bool = False) -> World:
    """A deploy of R2 that stopped in (or after) a step that is called by a name that nobody knows here."""
    world = board(R1, previous=R0)
    done = run(world, deploy(R2)())
    if active is R1:
        world.active, world.previous, world.synced = R1.id, R0.id, (R1.id, R0.id)
        world.runtimes[R0.id] = R0
    record = replace(done, outcome=Outcome.RUNNING, committed=False, ended_at="")
    for index in range(at, len(done.steps)):
        record = record.with_step(index, phase=Phase.PENDING)
    world.records[1] = record.with_step(at, kind="polish", phase=phase, volatile=volatile)
    return world


def recovered(world: World) -> ChangeRecord:
    record = engine_on(world).recover(lambda _: None)
    assert record is not None
    return record


def index_of(kind: str) -> int:
    return next(n for n, step in enumerate(run(board(R1), deploy(R2)()).steps) if step.kind == kind)


def test_after_the_commit_it_is_a_warning() -> None:
    world = interrupted(R2, index_of("prune"), Phase.DOING)
    record = recovered(world)
    assert (record.outcome, record.reason, record.steps[-1].warning) == (Outcome.APPLIED, None, UNKNOWN)


def test_one_before_the_commit_is_not_asked_whether_it_committed() -> None:
    world = interrupted(R2, index_of("prune"), Phase.PENDING)
    world.records[1] = world.records[1].with_step(0, kind="polish")
    record = recovered(world)
    assert (record.outcome, record.committed, record.reason) == (Outcome.APPLIED, True, None)


def test_one_that_had_not_begun_is_no_obstacle_to_going_back() -> None:
    world = interrupted(R1, index_of("activate"), Phase.PENDING)
    record = recovered(world)
    assert (record.outcome, record.reason and record.reason.code) == (Outcome.REVERTED, ErrorCode.CHANGE_REVERTED)
    assert (world.active, world.running["pose.service"][0]) == (R1.id, R1.id)


@pytest.mark.parametrize("phase", [Phase.DOING, Phase.DONE])
def test_one_that_a_reboot_undoes_is_passed_over_in_the_next_boot(phase: Phase) -> None:
    at = index_of("activate")
    world = interrupted(R1, at, phase, volatile=True)
    world.power_cut(lose_unsynced=False)
    record = recovered(world)
    assert (record.outcome, record.reason and record.reason.code) == (Outcome.REVERTED, ErrorCode.POWER_LOST)
    assert record.steps[at].phase is Phase.UNDONE
    assert record.steps[at].warning == "this agent does not know the step; the reboot has undone it"


@pytest.mark.parametrize(("volatile", "reboots"), [(True, False), (False, True), (False, False)])
def test_one_that_began_and_that_nothing_has_undone_leaves_the_change_stuck(volatile: bool, reboots: bool) -> None:
    world = interrupted(R1, index_of("activate"), Phase.DONE, volatile=volatile)
    if reboots:
        world.power_cut(lose_unsynced=False)
    record = recovered(world)
    assert record.reason
    assert (record.outcome, record.reason.code, record.reason.message.split(";")[0]) == (
        Outcome.STUCK,
        ErrorCode.CHANGE_STUCK,
        UNKNOWN,
    )


def test_a_record_says_what_a_reboot_undoes_once_a_step_has_begun() -> None:
    done = parse_record(run(board(R1), deploy(R2)()).as_bytes())
    lasting = {step.kind for step in done.steps if not step.volatile}
    assert lasting == {"fetch_images", "stage_runtime", "activate", "prune"}


def test_a_record_of_an_agent_that_did_not_say_it_reads_as_before() -> None:
    document = run(board(R1), deploy(R2)()).as_dict()
    for step in document["steps"]:
        del step["volatile"]
    assert not any(step.volatile for step in parse_record(json.dumps(document).encode()).steps)

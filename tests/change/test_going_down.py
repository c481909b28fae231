"""A board that is shut down in the middle of a change: what fails then is no failure, and the next boot decides."""

from __future__ import annotations

import pytest

from agent.change.engine import Engine
from agent.change.record import Outcome
from agent.change.step import Shutdown
from agent.contract.errors import ErrorCode, OperationError
from tests.change.sets import runtime
from tests.change.stories import R1, board, deploy
from tests.change.wired import change_on, engine_on
from tests.change.world import Call, World

R2 = runtime("2", pose_model="2")


def going_down(world: World, refused: tuple[str, ...]) -> Engine:
    """systemd ends these calls as it does during a shutdown, of which the agent is told a moment later."""
    failed = []

    def refuse(call: Call, _: World) -> OperationError | None:
        if call[: len(refused)] != refused:
            return None
        failed.append(call)
        return OperationError(ErrorCode.UNIT_FAILED, "cannot bring unit pose.service to its state: 'canceled'")

    def goes_down() -> bool:
        world.stopping = bool(failed)
        return world.stopping

    world.fail_when = refuse
    return engine_on(world, goes_down=goes_down)


def begin(engine: Engine, world: World) -> None:
    engine.run(change_on(world, deploy(R2)()), lambda record: None, cancelled=lambda: False)


def after_the_boot(world: World) -> None:
    world.stopping, world.fail_when = False, lambda call, _: None
    world.power_cut(lose_unsynced=False)
    record = engine_on(world).recover(lambda _: None)
    assert record is not None
    assert (record.outcome, world.active, world.shown["sysext"]) == (Outcome.REVERTED, R1.id, R1.id)


def test_a_start_that_a_shutdown_cancels_leaves_the_change_to_the_next_boot() -> None:
    world = board(R1)
    with pytest.raises(Shutdown):
        begin(going_down(world, ("start", "pose.service")), world)
    record = world.records[1]
    assert (record.outcome, record.reverting, record.reason) == (Outcome.RUNNING, False, None)
    after_the_boot(world)
    reason = world.records[1].reason
    assert reason is not None
    assert (reason.code, reason.message) == (
        ErrorCode.POWER_LOST,
        "cannot finish change 1: the board restarted, or lost its power, before activation",
    )


def test_an_undo_that_a_shutdown_refuses_leaves_nothing_stuck() -> None:
    world = board(R1)
    world.bad[R2.id] = "wrong-result"
    engine = going_down(world, ("start", "pose.service"))
    refuse = world.fail_when
    world.fail_when = lambda call, w: refuse(call, w) if w.reverting else None
    with pytest.raises(Shutdown):
        begin(engine, world)
    assert (world.records[1].outcome, world.records[1].reverting) == (Outcome.RUNNING, True)
    after_the_boot(world)
    reason = world.records[1].reason
    assert reason is not None
    assert reason.code is ErrorCode.UNHEALTHY

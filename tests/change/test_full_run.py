"""A full /run: systemd then refuses to read its unit files again, so a set with other units could not be followed."""

from __future__ import annotations

from agent.change.record import Outcome
from agent.contract.errors import ErrorCode, OperationError
from tests.change.stories import R1, R2, board, deploy
from tests.change.wired import run
from tests.change.world import Call, World

FULL = OperationError(ErrorCode.NO_SPACE, "cannot reload systemd: /run is full", "Free space on /run.")


def test_a_run_that_is_full_already_is_told_before_anything_stops() -> None:
    world = board(R1)
    world.fail_when = lambda call, _: FULL if call == ("require_reload",) else None
    record = run(world, deploy(R2)())
    assert record.outcome is Outcome.REVERTED
    assert record.reason is not None
    assert (record.reason.code, record.reason.message) == (ErrorCode.NO_SPACE, FULL.message)
    assert not [call for call in world.calls if call[0] in ("stop", "show", "reload_manager")]


def test_one_that_fills_up_during_the_trial_is_told_once_and_with_its_own_remedy() -> None:
    def refuse(call: Call, _: World) -> OperationError | None:
        return FULL if call == ("reload_manager",) else None

    world = board(R1)
    world.fail_when = refuse
    record = run(world, deploy(R2)())
    assert record.outcome is Outcome.STUCK
    assert record.reason is not None
    assert (record.reason.message, record.reason.remedy) == (
        FULL.message,
        "Free space on /run. Then run 'avocadoctl refresh', or reboot: the board starts with the active runtime.",
    )
    assert (world.active, world.shown["sysext"], "pose.service" in world.running) == (R1.id, R1.id, True)

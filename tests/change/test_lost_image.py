"""An image of the active runtime is lost from the disk: what replaces it must be let in, or nothing ever mends it."""

from __future__ import annotations

from agent.change.record import Outcome
from tests.change.stories import R1, R2, board, deploy
from tests.change.wired import run

MODEL = next(extension for extension in R1.extensions if extension.name == "pose-model")


def test_a_deploy_replaces_an_image_that_is_lost() -> None:
    world = board(R1)
    world.images.discard(MODEL.image_id)
    record = run(world, deploy(R2)())
    assert (record.outcome, record.reason) == (Outcome.APPLIED, None)
    assert ("stop", "pose.service") in world.calls
    assert ("reload_manager",) in world.calls  # what it brought is not known, so it may have been units

"""What a change needs of the disk, what a prune would free for it, and what is kept all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.contract import local
from agent.contract.errors import ErrorCode, OperationError
from agent.plan import SPARE_BYTES, ChangeKind, Wanted, plan_change
from tests.change.sets import runtime, with_keys
from tests.plans import (
    R0,
    R1,
    R2,
    WHOLE,
    board,
    deploy,
    image,
    step,
)


def test_where_space_is_short_the_unused_goes_first() -> None:
    old = with_keys(runtime("9", pose_app="9", pose_model="9"), target="virtual")
    observed = board(R1, R0, old, free_bytes=SPARE_BYTES - 500)
    steps = plan_change(observed, deploy(R2))
    assert [spec.kind for spec in steps] == ["prune", *WHOLE]
    assert steps[0].inputs["keep"] == [R1.id, R0.id, R2.id]


def test_no_space_even_without_the_unused_is_refused() -> None:
    with pytest.raises(OperationError) as caught:
        plan_change(board(R1, free_bytes=1000), deploy(R2))
    assert caught.value.code is ErrorCode.NO_SPACE
    assert caught.value.message == (
        "cannot deploy runtime npu-pose 2: it needs 17 MiB, and 1 MiB are free with everything unused removed"
    )
    assert caught.value.facts["needed_bytes"] == SPARE_BYTES + 1000


def test_what_is_there_of_an_interrupted_fetch_needs_no_room_again() -> None:
    nearly_full = board(R1, free_bytes=SPARE_BYTES + 100)
    with pytest.raises(OperationError) as caught:
        plan_change(nearly_full, deploy(R2))
    assert caught.value.code is ErrorCode.NO_SPACE
    resumed = replace(nearly_full, parts={image(R2, "pose-model"): 900})
    assert [spec.kind for spec in plan_change(resumed, deploy(R2))] == WHOLE


def test_parts_that_a_prune_removes_are_room() -> None:
    abandoned, arrived = image(runtime("9", pose_app="9"), "pose-app"), image(R1, "pose-app")
    parts = {abandoned: 600, arrived: 400}
    steps = plan_change(board(R1, parts=parts, free_bytes=SPARE_BYTES), deploy(R2))
    assert [spec.kind for spec in steps] == ["prune", *WHOLE]
    assert abandoned not in steps[0].inputs["keep_images"]


def test_what_was_left_out_of_a_local_runtime_is_no_room() -> None:
    without = local.disable(R1, "pose-app")
    images = {extension.image_id: 1000 for extension in R1.extensions}
    full = board(without, images=images, free_bytes=SPARE_BYTES)
    wanted = deploy(runtime("2", pose_app="2"))
    with pytest.raises(OperationError) as caught:
        plan_change(full, wanted)
    assert caught.value.facts["freeable_bytes"] == 0
    steps = plan_change(replace(full, images=images | {"stray": 2000}), wanted)
    assert image(R1, "pose-app") in step(steps, "prune")["keep_images"]


def test_a_rollback_to_what_is_on_the_disk_needs_no_space() -> None:
    assert plan_change(board(R2, R1, free_bytes=0), Wanted(ChangeKind.ROLLBACK, R1))

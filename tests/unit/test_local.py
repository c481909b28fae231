"""Local runtimes: a signed one without some extensions, and back, with nothing but what the board has."""

from __future__ import annotations

import pytest

from agent.contract import local
from agent.contract.errors import OperationError
from agent.contract.manifest import manifest_bytes, parse_manifest
from agent.plan import ChangeKind, Wanted, plan_change
from tests.change.sets import runtime
from tests.unit.test_plan import R0, R1, board, step


def names(manifest: object) -> list[str]:
    return [extension.name for extension in manifest.extensions]  # type: ignore[attr-defined]


def test_disabling_and_enabling_in_any_order_leads_back_to_the_signed_runtime() -> None:
    first = local.disable(R1, "pose-config")
    assert names(first) == [name for name in names(R1) if name != "pose-config"]
    assert (first.id != R1.id, first.runtime.version) == (True, f"{R1.runtime.version}+local")
    assert local.disable(first, "pose-config") == first
    stored = parse_manifest(manifest_bytes(local.disable(first, "npu-virtual")))
    assert local.signed(stored) == (R1, ("npu-virtual", "pose-config"))
    assert local.enable(stored, "npu-virtual").id == first.id
    assert local.enable(local.enable(stored, "pose-config"), "npu-virtual") == R1
    assert local.enable(R1, "pose-app") == R1


def test_the_same_extensions_left_out_are_the_same_runtime_and_of_another_base_are_not() -> None:
    one = local.disable(local.disable(R1, "pose-app"), "pose-model")
    other = local.disable(local.disable(R1, "pose-model"), "pose-app")
    assert one == other
    assert local.disable(R0, "pose-app").id != local.disable(R1, "pose-app").id


def test_an_extension_that_the_runtime_does_not_list_is_named_with_those_it_does() -> None:
    with pytest.raises(OperationError) as caught:
        local.disable(R1, "pose")
    assert caught.value.message == "cannot disable extension pose: runtime npu-pose 1 does not list it"
    assert caught.value.remedy == "It lists: pose-config, pose-model, pose-app, npu-virtual, avocado-agent."


def test_a_disabled_extensions_image_outlives_every_prune_until_the_signed_runtime_leaves() -> None:
    without = local.disable(R1, "pose-config")
    config = next(extension.image_id for extension in R1.extensions if extension.name == "pose-config")
    steps = plan_change(board(without, R1), Wanted(ChangeKind.DISABLE, local.disable(without, "pose-model")))
    assert step(steps, "prune")["keep_images"] == [config]
    assert step(steps, "fetch_images")["source"] is None
    assert "await_confirmation" not in {spec.kind for spec in steps}
    after = plan_change(board(without, R1), Wanted(ChangeKind.DEPLOY, runtime("9", pose_config="9"), source="unix:/x"))
    assert config in step(after, "prune")["keep_images"]

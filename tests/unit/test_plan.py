"""What is observed and wanted becomes a list of steps, or one refusal that says what and what to type next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agent.contract.errors import ErrorCode, OperationError
from agent.extensions import MergedSet
from agent.plan import Bystanders, ChangeKind, NpuFacts, Observed, Wanted, plan_change
from tests.change.sets import releases, runtime, with_keys
from tests.plans import (
    AGENT,
    CONFIRMED,
    INFERENCE,
    R0,
    R1,
    R2,
    VOLATILE,
    WHOLE,
    board,
    deploy,
    links,
    names,
    other_image,
    step,
    stranger,
)

KINDS = [
    ("a deploy", board(R1, R0), deploy(R2), WHOLE),
    ("a first deploy", board(None), deploy(R1), CONFIRMED),
    ("a deploy that changes /etc", board(R1), deploy(runtime("5", pose_config="5")), CONFIRMED),
    ("a rollback", board(R2, R1), Wanted(ChangeKind.ROLLBACK, R1), WHOLE),
    ("an activation", board(R1, R2), Wanted(ChangeKind.ACTIVATE, R2), WHOLE),
    ("a deploy of what already runs", board(R1), deploy(R1), []),
    ("a merge of what is merged", board(R1), Wanted(ChangeKind.MERGE, None), []),
    ("a merge", board(R1, merged=MergedSet({})), Wanted(ChangeKind.MERGE, None), VOLATILE),
    ("a merge under another image", board(R1, merged=other_image()), Wanted(ChangeKind.MERGE, None), VOLATILE),
    ("a deploy of what runs beside a stranger", board(R1, merged=stranger()), deploy(R1), [*WHOLE[:2], *VOLATILE[2:]]),
    ("a refresh", board(R1), Wanted(ChangeKind.REFRESH, None), VOLATILE),
    ("an unmerge", board(R1), Wanted(ChangeKind.UNMERGE, None), VOLATILE[:4]),
    ("an unmerge of nothing", board(R1, merged=MergedSet({})), Wanted(ChangeKind.UNMERGE, None), []),
    ("a deploy that repairs a lost image", board(R1, images={}), deploy(R1), [*WHOLE[:2], *VOLATILE[2:]]),
]


@pytest.mark.parametrize(("observed", "wanted", "kinds"), [case[1:] for case in KINDS], ids=[case[0] for case in KINDS])
def test_the_plan_is_this_list(observed: Observed, wanted: Wanted, kinds: list[str]) -> None:
    assert [spec.kind for spec in plan_change(observed, wanted)] == kinds


SHARED = replace(INFERENCE, contexts=2)
WARMED = [*WHOLE[:2], "warm_up", *WHOLE[2:]]
WARM_UPS = [
    ("a deploy", board(R1, R0), deploy(R2), WARMED),
    ("a rollback", board(R2, R1), Wanted(ChangeKind.ROLLBACK, R1), WARMED),
    ("an activation", board(R1, R2), Wanted(ChangeKind.ACTIVATE, R2), WARMED),
    ("the agent alone", board(R1), deploy(AGENT), WHOLE),
    ("with no pose service to spare", board(R1, inference=None), deploy(R2), WHOLE),
    ("beside a silent one", board(R1, inference=None, silent=True), deploy(R2), WHOLE),
    ("an extension that comes anew", board(runtime("4", pose_app=""), R0), deploy(runtime("5")), WARMED),
    ("a refresh", board(R1), Wanted(ChangeKind.REFRESH, None), VOLATILE),
    ("an unmerge", board(R1), Wanted(ChangeKind.UNMERGE, None), VOLATILE[:4]),
    ("what already runs", board(R1), deploy(R1), []),
]


@pytest.mark.parametrize(
    ("observed", "wanted", "kinds"), [case[1:] for case in WARM_UPS], ids=[case[0] for case in WARM_UPS]
)
def test_a_model_is_tried_before_the_stop_where_another_may_serve(
    observed: Observed, wanted: Wanted, kinds: list[str]
) -> None:
    assert [spec.kind for spec in plan_change(observed, replace(wanted, warm_up=True))] == kinds
    assert "warm_up" not in {spec.kind for spec in plan_change(observed, wanted)}


def test_a_trial_is_told_what_changes_and_how_many_the_npu_serves() -> None:
    inputs = step(plan_change(board(R1, inference=SHARED), replace(deploy(R2), warm_up=True)), "warm_up")
    assert names(inputs.pop("images")) == ["pose-model"]
    npu = {"nodes": ["/dev/simnpu0"], "contexts": 2, "backend": "npu"}
    assert inputs == {"to": R2.id, "units": ["pose.service"], **npu}


def test_only_what_changes_is_stopped_and_everything_is_verified() -> None:
    steps = plan_change(board(R1), deploy(R2))
    stop = step(steps, "stop_services")
    assert stop["units"] == ["pose.service"]
    assert names(stop["leaving"]) == names(stop["images"]) == ["pose-model"]
    assert (stop["leaving"][0]["version"], stop["images"][0]["version"]) == ("1", "2")
    assert names(step(steps, "fetch_images")["extensions"]) == [e.name for e in R2.extensions]
    assert names(step(steps, "fetch_images")["held"]) == [e.name for e in R1.extensions]


def test_the_switch_names_both_sets() -> None:
    overlay = step(plan_change(board(R1), deploy(R2)), "switch_overlay")
    assert (overlay["from"], overlay["to"]) == (R1.id, R2.id)
    assert overlay["to_names"]["confext"] == ["99-pose-config"]
    assert overlay["to_names"]["sysext"] == ["95-avocado-agent", "96-npu-virtual", "97-pose-app", "98-pose-model"]


def test_the_way_back_from_a_runtime_whose_manifest_is_damaged_is_that_runtime() -> None:
    def switch(observed: Observed) -> dict[str, Any]:
        steps = plan_change(observed, Wanted(ChangeKind.ROLLBACK, R2))
        return next(step.inputs for step in steps if step.kind == "switch_overlay")

    damaged = replace(board(R1, R2), runtimes={R2.id: R2})
    merged = {kind.value: list(names) for kind, names in links(R1).names.items()}
    assert (switch(damaged)["from"], switch(damaged)["from_names"]) == (R1.id, merged)
    bare = replace(damaged, merged=MergedSet({}))
    assert (switch(bare)["from"], switch(bare)["from_names"]) == (None, {})


def test_the_agent_is_never_among_the_units() -> None:
    steps = plan_change(board(R1), deploy(AGENT))
    assert names(step(steps, "stop_services")["images"]) == ["avocado-agent"]
    assert step(steps, "stop_services")["units"] == step(steps, "start_services")["units"] == []


def test_bystanders_stop_with_the_units_and_are_told_from_them() -> None:
    others = Bystanders(("pose.service", "viewer.service"), jobs=("backup.service",), unread=("pid 3",))
    steps = plan_change(board(R1, bystanders=others), deploy(R2))
    stop = step(steps, "stop_services")
    assert (stop["units"], stop["bystanders"]) == (["pose.service", "viewer.service"], ["viewer.service"])
    assert (stop["jobs"], stop["unread"]) == (["backup.service"], ["pid 3"])
    assert step(steps, "confirm_health")["bystanders"] == ["viewer.service"]


def test_the_npu_is_as_the_service_describes_it_or_as_the_last_change_knew_it() -> None:
    assert step(plan_change(board(R1), deploy(R2)), "release_npu")["nodes"] == ["/dev/simnpu0"]
    known = board(R1, inference=None, last_npu=NpuFacts(("/dev/galcore",), 1.5, 1))
    assert step(plan_change(known, deploy(R2)), "release_npu")["settle_s"] == 1.5
    assert step(plan_change(board(R1, inference=None), deploy(R2)), "release_npu")["nodes"] == []


REFUSED = [
    (
        {"target": "imx8mp"},
        ErrorCode.WRONG_TARGET,
        "cannot deploy runtime npu-pose 2: it is for target imx8mp, this board is virtual",
        "Build it for this board: 'avocadoctl build --target virtual'.",
    ),
    (
        {"arch": "aarch64"},
        ErrorCode.WRONG_TARGET,
        "cannot deploy runtime npu-pose 2: it is for aarch64, this board is x86_64",
        "",
    ),
    (
        {"requires": {"python": "3.11"}},
        ErrorCode.REQUIREMENT_UNMET,
        "cannot deploy runtime npu-pose 2: it needs Python 3.11, this board has 3.13",
        "Build it for Python 3.13: set it in the target's file.",
    ),
    (
        {"requires": {"agent": "1.10"}},
        ErrorCode.REQUIREMENT_UNMET,
        "cannot deploy runtime npu-pose 2: it needs agent 1.10, this board runs 1.2.0",
        "Deploy a runtime that only updates avocado-agent, then run 'systemctl restart avocadod' on the board.",
    ),
    (
        {"requires": {"os": {"VERSION_ID": "12"}}},
        ErrorCode.REQUIREMENT_UNMET,
        "cannot deploy runtime npu-pose 2: it needs VERSION_ID=12, this board has VERSION_ID=13",
        "Build it for the operating system of this board.",
    ),
    (
        {"os_bundle": {"image_id": "x"}},
        ErrorCode.UNSUPPORTED,
        "cannot deploy runtime npu-pose 2: it brings an OS bundle, and this agent does not update the operating system",
        "Build the runtime without 'os_bundle' and update the OS with its own tool.",
    ),
]


def test_an_agent_that_is_merged_and_does_not_run_yet_is_the_way_out() -> None:
    with pytest.raises(OperationError) as caught:
        plan_change(board(newer_agent="1.11"), deploy(with_keys(R2, requires={"agent": "1.10"})))
    assert caught.value.remedy == (
        "Run 'systemctl restart avocadod' on the board: agent 1.11 is merged and does not run yet."
    )


@pytest.mark.parametrize(("keys", "code", "message", "remedy"), REFUSED)
def test_what_this_board_cannot_run_is_refused_before_anything_moves(
    keys: dict[str, Any], code: ErrorCode, message: str, remedy: str
) -> None:
    with pytest.raises(OperationError) as caught:
        plan_change(board(R1), deploy(with_keys(R2, **keys)))
    assert (caught.value.code, caught.value.message, caught.value.remedy) == (code, message, remedy)


def test_requirements_that_are_met_are_no_obstacle() -> None:
    met = {"python": "3.13", "agent": "1.2", "os": {"ID": "debian"}}
    assert plan_change(board(R1), deploy(with_keys(R2, requires=met)))


def test_an_image_on_the_board_that_systemd_would_ignore_is_refused() -> None:
    known = releases(R1, R2)
    for keys in known[R2.extensions[1].image_id].values():
        keys["VERSION_ID"] = "99"
    with pytest.raises(OperationError) as caught:
        plan_change(board(R1, R2, releases=known), Wanted(ChangeKind.ACTIVATE, R2))
    assert caught.value.code is ErrorCode.INCOMPATIBLE
    assert caught.value.message == (
        "cannot activate runtime npu-pose 2: systemd would ignore extension pose-model 2: "
        "VERSION_ID=99, the board is 13"
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ChangeKind.MERGE, "cannot merge the extensions: no runtime is active"),
        (ChangeKind.REFRESH, "cannot refresh the extensions: no runtime is active"),
        (ChangeKind.ROLLBACK, "cannot roll back to a runtime: there is none to change to"),
    ],
)
def test_with_no_runtime_there_is_nothing_to_change_to(kind: ChangeKind, message: str) -> None:
    with pytest.raises(OperationError) as caught:
        plan_change(board(None), Wanted(kind, None))
    assert (caught.value.code, caught.value.message) == (ErrorCode.NOT_FOUND, message)
    assert caught.value.remedy

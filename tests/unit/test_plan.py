"""What is observed and wanted becomes a list of steps, or one refusal that says what and what to type next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agent.contract import local
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Manifest
from agent.extensions import Kind, MergedSet
from agent.health import InferenceState
from agent.plan import SPARE_BYTES, Bystanders, ChangeKind, NpuFacts, Observed, StepSpec, Wanted, plan_change
from tests.change.sets import OS_RELEASE, releases, runtime, with_keys

R0 = runtime("0", pose_model="0")
R1 = runtime("1")
R2 = runtime("2", pose_model="2")
AGENT = runtime("3", avocado_agent="3")
INFERENCE = InferenceState("serving", "npu", "ok", "npu", "movenet 1", 99, True, True, ("/dev/simnpu0",), 0.2, 1)
WHOLE = [
    "fetch_images",
    "stage_runtime",
    "stop_services",
    "release_npu",
    "switch_overlay",
    "reload",
    "start_services",
    "confirm_health",
    "activate",
    "prune",
]
CONFIRMED = [*WHOLE[:-2], "await_confirmation", *WHOLE[-2:]]
VOLATILE = ["stop_services", "release_npu", "switch_overlay", "reload", "start_services", "confirm_health"]


def links(manifest: Manifest) -> MergedSet:
    names: dict[Kind, list[str]] = {kind: [] for kind in Kind}
    for extension in manifest.extensions:
        for kind in extension.types:
            names[Kind(kind)].append(manifest.link_name(extension).removesuffix(".raw"))
    return MergedSet({kind: tuple(sorted(found)) for kind, found in names.items()})


def board(active: Manifest | None = R1, *others: Manifest, **changed: Any) -> Observed:
    staged = [manifest for manifest in (active, *others) if manifest]
    observed = Observed(
        target="virtual",
        arch="x86_64",
        python="3.13",
        agent_version="1.2.0",
        os_release=OS_RELEASE,
        active=active.id if active else None,
        previous=others[0].id if others else None,
        runtimes={manifest.id: manifest for manifest in staged},
        images={e.image_id: e.size_bytes for m in staged for e in m.extensions},
        releases=releases(*staged),
        merged=links(active) if active else MergedSet({}),
        free_bytes=1 << 40,
        inference=INFERENCE if active else None,
    )
    return replace(observed, **changed)


def deploy(manifest: Manifest) -> Wanted:
    return Wanted(ChangeKind.DEPLOY, manifest, source="http://host/")


def step(steps: list[StepSpec], kind: str) -> dict[str, Any]:
    return next(spec.inputs for spec in steps if spec.kind == kind)


def names(images: list[dict[str, Any]]) -> list[str]:
    return [image["name"] for image in images]


def other_image() -> MergedSet:
    """The names of R1, one of them another image's."""
    return replace(links(R1), images={Kind.SYSEXT: {"98-pose-model": image(R2, "pose-model")}})


def stranger() -> MergedSet:
    """R1, and what somebody merged beside it."""
    names = links(R1).names
    return MergedSet({**names, Kind.SYSEXT: ("10-stranger", *names[Kind.SYSEXT])})


def image(manifest: Manifest, name: str) -> str:
    return next(extension.image_id for extension in manifest.extensions if extension.name == name)


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


@pytest.mark.parametrize(
    ("source", "confirm", "inputs"),
    [
        ("unix:/run/avocado/receive-1.sock", {}, {"within_s": 60.0, "server": None}),
        ("https://host/r", {"within_s": 20}, {"within_s": 20.0, "server": "https://host/r"}),
        ("https://host/r", {"within_s": 0.1}, {"within_s": 60.0, "server": "https://host/r"}),
    ],
)
def test_a_change_of_etc_is_confirmed_by_the_host_or_by_reaching_the_server(
    source: str, confirm: dict[str, Any], inputs: dict[str, Any]
) -> None:
    manifest = with_keys(runtime("5", pose_config="5"), confirm=confirm)
    steps = plan_change(board(R1), Wanted(ChangeKind.DEPLOY, manifest, source=source))
    assert step(steps, "await_confirmation") == inputs


@pytest.mark.parametrize("kind", [ChangeKind.ROLLBACK, ChangeKind.ACTIVATE, ChangeKind.ENABLE, ChangeKind.DISABLE])
def test_a_change_of_etc_that_was_asked_for_from_afar_waits_for_the_host(kind: ChangeKind) -> None:
    other = runtime("5", pose_config="5")
    from_afar = plan_change(board(R1, other), Wanted(kind, other, await_host=True))
    assert step(from_afar, "await_confirmation") == {"within_s": 60.0, "server": None}
    here = plan_change(board(R1, other), Wanted(kind, other))
    assert [spec.kind for spec in here] == [spec.kind for spec in from_afar if spec.kind != "await_confirmation"]
    untouched = plan_change(board(R1, R2), Wanted(kind, R2, await_host=True))
    assert "await_confirmation" not in {spec.kind for spec in untouched}


def etc(*images: tuple[str, str], known: bool = True) -> MergedSet:
    """R1 with this over /etc: merge names and images."""
    names = {**links(R1).names, Kind.CONFEXT: tuple(sorted(name for name, _ in images))}
    return MergedSet(names, images={Kind.CONFEXT: dict(images)} if known else {})


CONFIG = ("99-pose-config", image(R1, "pose-config"))
NONE = MergedSet({})
VOLATILE_ETC = [
    (ChangeKind.UNMERGE, links(R1), True),
    (ChangeKind.UNMERGE, etc(), False),  # nothing lies over /etc
    (ChangeKind.MERGE, NONE, True),
    (ChangeKind.REFRESH, links(R1), False),
    (ChangeKind.REFRESH, etc(CONFIG), False),
    (ChangeKind.REFRESH, etc(), True),  # somebody unmerged it by hand
    (ChangeKind.REFRESH, etc(("99-pose-config", "another")), True),
    (ChangeKind.REFRESH, etc(CONFIG, ("10-stranger", "its")), True),
    (ChangeKind.REFRESH, etc(CONFIG, ("10-stranger", "its"), known=False), True),
    (ChangeKind.REFRESH, etc(("42-pose-config", CONFIG[1])), False),  # the same image under another number
]


@pytest.mark.parametrize(("kind", "merged", "waits"), VOLATILE_ETC)
def test_a_volatile_change_from_afar_waits_for_the_host_where_etc_changes(
    kind: ChangeKind, merged: MergedSet, waits: bool
) -> None:
    observed = board(R1, merged=merged)
    from_afar = plan_change(observed, Wanted(kind, None, await_host=True))
    assert ([spec.inputs for spec in from_afar if spec.kind == "await_confirmation"]) == (
        [{"within_s": 60.0, "server": None}] if waits else []
    )
    assert not waits or from_afar[-1].kind == "await_confirmation"
    here = plan_change(observed, Wanted(kind, None))
    assert "await_confirmation" not in {spec.kind for spec in here}


def test_an_unmerge_waits_as_long_as_the_runtime_that_goes_says() -> None:
    patient = with_keys(R1, confirm={"within_s": 90})
    steps = plan_change(board(patient), Wanted(ChangeKind.UNMERGE, None, await_host=True))
    assert step(steps, "await_confirmation")["within_s"] == 90.0


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

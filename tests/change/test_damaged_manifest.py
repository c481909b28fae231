"""The active runtime's manifest is damaged or lost: the board goes on from its links, and a deploy puts it right."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.change.record import Outcome
from agent.change.steps.prune import Prune
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.linked import LinkedRuntime, linked_runtime
from agent.contract.local import is_partial
from agent.contract.manifest import Manifest
from agent.extensions import Kind, MergedSet, Problem, merge_names
from agent.observe import Disk, Identity, Observer
from agent.plan import ChangeKind, Wanted, plan_change
from agent.ports.protocols import Overlay
from agent.ports.runtimes import FileRuntimes
from agent.requests import Ask, OpenSources, Planner
from agent.verbs.status import extension_table, render
from tests.change.fake_disk import FakeImages, FakeRuntimes, FakeStore
from tests.change.fakes import FakeInference, FakeOverlay, FakeUnits
from tests.change.sets import runtime, with_keys
from tests.change.stories import R1, R2, board, deploy
from tests.change.wired import observe, plan_on, run
from tests.change.world import World

BARE = runtime("bare", avocado_agent="")
REMEDY = "Deploy again from the host: avocadoctl deploy -H BOARD"
GARBAGE = f"cannot read the manifest of runtime {R1.id}: garbage"


def _garbage(path: Path) -> None:
    path.write_text("garbage")


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "x").touch()


def _of_another(path: Path) -> None:
    path.write_text(R2.model_dump_json())


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "garbage": (_garbage, "Expecting value: line 1 column 1 (char 0)"),
    "unreadable": (_folder, "Is a directory"),
    "lost": (Path.unlink, "No such file or directory"),
    "of another": (_of_another, f"it is runtime {R2.id}'s"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_manifest_that_cannot_be_read_is_named_and_written_again_by_its_own_runtime(
    tmp_path: Path, damage: str
) -> None:
    runtimes, unused = FileRuntimes(tmp_path), None
    store: Any = unused
    disk = Disk(store, runtimes, store)
    assert disk.active_manifest() is None
    folder = runtimes.stage(R1)
    runtimes.activate(R1.id, None)
    before = {path: path.readlink() for path in folder.glob("*/*.raw")}
    spoil, why = DAMAGE[damage]
    spoil(folder / "manifest.json")
    [error] = disk.manifests()[1]
    assert (error.code, error.message, error.remedy) == (
        ErrorCode.BAD_MANIFEST, f"cannot read the manifest of runtime {R1.id}: {why}", REMEDY
    )  # fmt: skip
    active = disk.active_manifest()
    assert isinstance(active, LinkedRuntime)
    assert [(active.link_name(e), e.image_id, e.types) for e in active.extensions] == [
        (R1.link_name(e), e.image_id, e.types) for e in R1.extensions
    ]
    lost = folder / "sysext" / R1.link_name(R1.extensions[1])
    lost.unlink()
    assert runtimes.stage(R1) == folder
    assert disk.manifests() == ({R1.id: R1}, [])
    assert {path: path.readlink() for path in folder.glob("*/*.raw")} == before
    assert runtimes.active() == R1.id


def test_another_set_of_images_does_not_take_the_place_of_a_runtime_whose_manifest_is_damaged(tmp_path: Path) -> None:
    runtimes = FileRuntimes(tmp_path)
    folder = runtimes.stage(R1)
    runtimes.activate(R1.id, None)
    (folder / "manifest.json").unlink()
    with pytest.raises(OperationError) as caught:
        runtimes.stage(with_keys(R2, id=R1.id))
    assert caught.value.message == (
        f"cannot stage runtime {R1.id}: another manifest of that id is in use on this board"
    )
    assert not (folder / "manifest.json").exists()


def test_an_active_runtime_whose_whole_folder_is_lost_is_a_problem_and_can_be_brought_back(tmp_path: Path) -> None:
    runtimes, unused = FileRuntimes(tmp_path), None
    store: Any = unused
    folder = runtimes.stage(R1)
    runtimes.activate(R1.id, None)
    shutil.rmtree(folder)
    [error] = Disk(store, runtimes, store).manifests()[1]
    assert error.message == f"cannot read the manifest of runtime {R1.id}: No such file or directory"
    runtimes.stage(R1)
    assert runtimes.manifest(R1.id) == R1


def damaged() -> World:
    world = board(R1)
    world.unreadable.add(R1.id)
    return world


def test_the_same_runtime_deployed_again_writes_its_manifest_and_moves_nothing_else() -> None:
    world = damaged()
    serving = dict(world.running)
    assert [step.kind for step in plan_on(world, deploy(R1)())] == ["fetch_images", "stage_runtime"]
    assert run(world, deploy(R1)()).outcome is Outcome.APPLIED
    assert (world.unreadable, world.running) == (set(), serving)
    assert not [call for call in world.calls if call[0] in ("stop", "start", "show", "activate")]
    assert plan_on(world, deploy(R1)()) == []


def test_with_an_image_lost_too_the_whole_change_runs() -> None:
    world = damaged()
    world.images.discard(R1.extensions[1].image_id)
    assert run(world, deploy(R1)()).outcome is Outcome.APPLIED
    assert world.images >= {e.image_id for e in R1.extensions}
    assert world.unreadable == set()


def test_another_runtime_stops_and_switches_what_the_links_name() -> None:
    world = damaged()
    assert run(world, deploy(R2)()).outcome is Outcome.APPLIED
    assert ("stop", "pose.service") in world.calls
    assert world.active == R2.id


@pytest.mark.parametrize("kind", [ChangeKind.REFRESH, ChangeKind.MERGE])
def test_refresh_and_merge_do_what_the_links_say(kind: ChangeKind) -> None:
    world = damaged()
    if kind is ChangeKind.MERGE:
        world.shown = dict.fromkeys(Kind)
        world.running = {}
    assert run(world, Wanted(kind, None)).outcome is Outcome.APPLIED
    assert world.shown == dict.fromkeys(Kind, R1.id)
    assert "pose.service" in world.running


def test_unmerge_takes_away_what_the_links_name() -> None:
    world = damaged()
    assert run(world, Wanted(ChangeKind.UNMERGE, None)).outcome is Outcome.APPLIED
    assert world.shown == dict.fromkeys(Kind)


@pytest.mark.parametrize("kind", [ChangeKind.REFRESH, ChangeKind.MERGE, ChangeKind.UNMERGE])
def test_where_the_links_are_lost_too_nothing_is_guessed(kind: ChangeKind) -> None:
    world = damaged()
    seen = observe(world)
    with pytest.raises(OperationError) as caught:
        plan_change(
            replace(seen, runtimes={R1.id: linked_runtime(R1.id, {}).on_board("virtual", "x86_64")}), Wanted(kind, None)
        )
    assert (caught.value.code, caught.value.message, caught.value.remedy) == (
        ErrorCode.BAD_MANIFEST,
        f"cannot {kind.value} the extensions: the manifest of runtime {R1.id} cannot be read, and its links do not tell"
        " what is merged",
        REMEDY,
    )


def with_a_link_lost(world: World) -> Any:
    """What is observed where a link of pose-config was lost after it was merged, and its others are there."""
    links = {
        kind: {name: image for name, image in named.items() if not name.endswith("-pose-config")}
        for kind, named in FakeRuntimes(world).links(R1.id).items()
    }
    lost = linked_runtime(R1.id, links).on_board("virtual", "x86_64")
    return replace(observe(world), runtimes={R1.id: lost})


def test_the_way_back_requires_all_that_is_merged_and_not_only_what_the_links_still_name() -> None:
    world = damaged()
    seen = with_a_link_lost(world)
    [switch] = [step for step in plan_change(seen, deploy(R2)()) if step.kind == "switch_overlay"]
    assert (switch.inputs["from"], switch.inputs["from_names"]) == (R1.id, merge_names(R1))


@pytest.mark.parametrize("kind", [ChangeKind.REFRESH, ChangeKind.MERGE, ChangeKind.UNMERGE])
def test_where_a_link_is_lost_that_was_merged_nothing_is_taken_away(kind: ChangeKind) -> None:
    with pytest.raises(OperationError) as caught:
        plan_change(with_a_link_lost(damaged()), Wanted(kind, None))
    assert (caught.value.code, caught.value.message) == (
        ErrorCode.BAD_MANIFEST,
        f"cannot {kind.value} the extensions: the manifest of runtime {R1.id} cannot be read, and its links do not tell"
        " what is merged",
    )


def planner(world: World, offered: Manifest | None = None) -> Planner:
    finder: Any = SimpleNamespace(find=lambda leaving, owned: observe(world).bystanders)
    journal: Any = SimpleNamespace(changes=lambda: iter(()))
    source: Any = SimpleNamespace(
        manifest=lambda: offered, transfer_sizes=lambda e, held: (1, None), close=lambda: None
    )
    return Planner(observer(world), journal, OpenSources(lambda _: source), finder)


def observer(world: World, overlay: Overlay | None = None) -> Observer:
    identity = Identity("virtual", "x86_64", "3.13", "1.0.0", {"ID": "debian", "VERSION_ID": "13"})
    disk = Disk(FakeStore(world), FakeRuntimes(world), FakeImages(world))
    return Observer(identity, disk, overlay or FakeOverlay(world), FakeUnits(world), FakeInference(world))


def test_no_runtime_without_the_agent_is_let_in_meanwhile() -> None:
    with pytest.raises(OperationError) as caught:
        planner(damaged(), BARE).plan(Ask(ChangeKind.DEPLOY, "root", source="http://host/"))
    assert caught.value.code is ErrorCode.REQUIREMENT_UNMET
    assert "it leaves out avocado-agent" in caught.value.message
    assert planner(damaged(), R2).plan(Ask(ChangeKind.DEPLOY, "root", source="http://host/")).to_runtime == R2.id


@pytest.mark.parametrize(
    "ask",
    [
        Ask(ChangeKind.ACTIVATE, "root", runtime=R1.id),
        Ask(ChangeKind.DISABLE, "root", extension="pose-config"),
        Ask(ChangeKind.ENABLE, "root", extension="pose-config"),
    ],
)
def test_what_needs_the_manifest_itself_says_that_it_is_damaged(ask: Ask) -> None:
    with pytest.raises(OperationError) as caught:
        planner(damaged()).plan(ask)
    assert (caught.value.code, caught.value.message) == (ErrorCode.BAD_MANIFEST, GARBAGE)


def document(world: World, overlay: Overlay | None = None, extra: Any = ()) -> Any:
    return observer(world, overlay).document(None, None, extra, busy=False, interval_s=5.0, now="2026-11-30T22:00:00Z")


def test_the_status_names_the_damage_once_and_knows_what_is_merged() -> None:
    world = damaged()
    again = Problem("bad-manifest", GARBAGE, "")  # as a start that failed for it says too
    found = document(world, extra=[again])
    assert [problem["message"] for problem in found["problems"]] == [GARBAGE]
    assert found["runtime"] is None
    assert "Runtime    its manifest cannot be read, see the problems" in render(found, 0.0).splitlines()
    assert [(e["name"], e["isMerged"], e["origin"]) for e in found["extensions"]] == [
        (e.name, True, "runtime") for e in R1.extensions
    ]
    assert [service["name"] for service in found["services"]] == ["pose.service", "avocadod.service"]


class Dumb(FakeOverlay):
    def merged(self) -> MergedSet:
        raise OperationError(ErrorCode.SWITCH_FAILED, "cannot run systemd-sysext: no such thing")


def test_where_nobody_can_tell_what_is_merged_nothing_is_said_not_to_be() -> None:
    world = board(R1)
    world.running["avocadod.service"] = (R1.id, world.now_s)
    found = document(world, Dumb(world))
    assert [p["message"] for p in found["problems"]] == ["cannot run systemd-sysext: no such thing"]
    assert all(e["isUnknown"] and not e["isMerged"] for e in found["extensions"])
    assert [line.split()[2] for line in extension_table(found["extensions"]).splitlines()[1:]] == ["unknown"] * 5
    world.images.discard(R1.extensions[1].image_id)
    assert [p["code"] for p in document(world, Dumb(world))["problems"]] == ["switch-failed", "image-missing"]


def test_whatever_may_have_been_left_out_of_it_is_not_missed() -> None:
    assert is_partial(linked_runtime(R1.id, {}))
    assert not is_partial(R1)


def test_a_prune_keeps_what_the_links_of_a_damaged_runtime_lead_to() -> None:
    world = damaged()
    stray = R2.extensions[1].image_id
    world.images.add(stray)
    assert run(world, deploy(R2)()).outcome is Outcome.APPLIED  # R1 is the previous one now, its manifest damaged
    world.images.add(BARE.id)
    prune = Prune(FakeRuntimes(world), FakeStore(world))
    report: Any = SimpleNamespace(fact=lambda name, value: None)
    prune.do({"keep": []}, {}, report)
    assert BARE.id not in world.images
    assert world.images >= {e.image_id for m in (R1, R2) for e in m.extensions}
    world.images.add(BARE.id)
    for links in ({}, {kind: {} for kind in Kind}):
        said: list[str] = []
        lost: Any = type("Lost", (FakeRuntimes,), {"links": lambda self, runtime_id, links=links: links})(world)
        report = SimpleNamespace(fact=lambda name, value: None, warn=said.append)
        Prune(lost, FakeStore(world)).do({"keep": []}, {}, report)
        assert BARE.id in world.images
        assert said == [
            f"no image was removed: neither the manifest nor the links of runtime {R1.id} tell which it needs"
        ]

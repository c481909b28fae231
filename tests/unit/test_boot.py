"""The other half of a boot's merge: once per boot, in order, and whatever fails keeps nothing else back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent.boot import BootHalf
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.local import disable
from agent.extensions import Kind
from agent.observe import Disk
from tests.change.fake_disk import FakeImages, FakeIndexer, FakeRuntimes, FakeStore
from tests.change.fakes import FakeOverlay, FakeUnits
from tests.change.stories import R1, R2, board
from tests.change.world import Call, World

QUIET = ("release", "journal")


def booted() -> World:
    world = board(R1)
    world.running = {}
    return world


def boot(world: World, marker: Path) -> list[str]:
    """The problems it found; the world's calls say what it did."""
    return [problem.message for problem in half_of(world, marker).run(start_timeout_s=1, command_timeout_s=1)]


@pytest.mark.parametrize("links_only", [False, True])
def test_a_damaged_manifest_keeps_nothing_of_it_from_being_done(tmp_path: Path, links_only: bool) -> None:
    world = booted()
    world.indexes.clear()
    world.unreadable |= {R1.id} if links_only else set()
    assert boot(world, tmp_path / "marker") == []
    assert effects(world) == [
        ("index",),
        ("point_index", R1.id),
        ("show", R1.id),
        ("run", "modprobe", "--", "simnpu"),
        ("start", "pose.service"),
    ]


def test_where_nothing_is_merged_a_damaged_index_merges_nothing(tmp_path: Path) -> None:
    world = booted()
    world.shown = dict.fromkeys(Kind)
    world.damaged.add(world.indexes[R1.id])
    assert boot(world, tmp_path / "marker") == []
    assert (effects(world), world.shown) == ([], dict.fromkeys(Kind))


def half_of(world: World, marker: Path) -> BootHalf:
    disk = Disk(FakeStore(world), FakeRuntimes(world), FakeImages(world))
    return BootHalf(disk, FakeOverlay(world), FakeUnits(world), FakeIndexer(world), marker)


@pytest.mark.parametrize("links_only", [False, True])
def test_a_damaged_image_is_a_problem_until_it_is_not_merged_any_more(tmp_path: Path, links_only: bool) -> None:
    world = booted()
    world.unreadable |= {R1.id} if links_only else set()
    model = next(e for e in R1.extensions if e.name == "pose-model")
    world.damaged.add(model.image_id)
    half = half_of(world, tmp_path / "marker")
    half.run(start_timeout_s=1, command_timeout_s=1)
    # Another agent of the same boot knows it too.
    again = half_of(world, tmp_path / "marker")
    assert again.run(start_timeout_s=1, command_timeout_s=1) == []
    version = "unknown" if links_only else model.version
    said = f"extension pose-model {version}: its image no longer has the bytes that were signed"
    assert [[p.message for p in one.damaged()] for one in (half, again)] == [[said], [said]]
    # Not merged it is nobody's problem, and merged again it is one again.
    world.runtimes[R2.id] = R2
    world.shown = dict.fromkeys(Kind, R2.id)
    assert (half.damaged(), again.damaged()) == ([], [])
    world.shown = dict.fromkeys(Kind, R1.id)
    assert [p.message for p in half.damaged()] == [said]
    # Fetched anew it is another file than the one that is merged.
    world.damaged.clear()
    mended = (
        f"extension pose-model {version}: its image is mended on the disk; what runs was merged from the damaged one",
        "Reboot when it suits; if it happens again, replace the disk.",
    )
    assert [[(p.message, p.remedy) for p in one.damaged()] for one in (half, again)] == [[mended], [mended]]
    world.shown = dict.fromkeys(Kind, R2.id)
    assert (half.damaged(), again.damaged()) == ([], [])
    world.shown = dict.fromkeys(Kind, R1.id)
    assert (half.damaged(), again.damaged()) == ([], [])


def effects(world: World) -> list[Call]:
    return [call for call in world.calls if call[0] not in QUIET]


def test_modules_are_loaded_and_services_started_once_per_boot(tmp_path: Path) -> None:
    world = booted()
    assert boot(world, tmp_path / "marker") == []
    assert effects(world) == [("run", "modprobe", "--", "simnpu"), ("start", "pose.service")]
    world.calls.clear()
    assert boot(world, tmp_path / "marker") == []
    assert effects(world) == []


def test_a_runtime_without_an_index_gets_one_before_a_module_is_asked_for(tmp_path: Path) -> None:
    world = booted()
    world.indexes.clear()
    boot(world, tmp_path / "marker")
    assert effects(world)[:4] == [
        ("index",),
        ("point_index", R1.id),
        ("show", R1.id),
        ("run", "modprobe", "--", "simnpu"),
    ]
    assert world.indexes[R1.id] in world.images


ANEW = (
    "the index of kernel modules that this board made no longer had the bytes of its name; it was made anew",
    "If it happens again, replace the disk.",
)
NOT_ANEW = (
    "the index of kernel modules that this board made no longer had the bytes of its name",
    "Check the disk (journalctl -k -b -p warning), then reboot: the agent makes it anew at its start.",
)


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_damaged_index_is_made_anew_before_a_module_is_asked_for_and_is_a_problem_until_the_next_boot(
    tmp_path: Path, is_lost: bool
) -> None:
    world = booted()
    index = world.indexes[R1.id]
    (world.images.remove if is_lost else world.damaged.add)(index)
    assert boot(world, tmp_path / "marker") == [ANEW[0]]
    # Shown without it between: the overlay would keep the file that it was made of.
    assert effects(world)[:7] == [
        ("point_index", R1.id),
        ("show", R1.id),
        ("index",),
        ("point_index", R1.id),
        ("show", R1.id),
        ("run", "modprobe", "--", "simnpu"),
        ("start", "pose.service"),
    ]
    assert (world.indexes[R1.id], index in world.images - world.damaged) == (index, True)
    assert json.loads((tmp_path / "marker").read_text())[0] == {
        "code": "module-index-damaged", "message": ANEW[0], "remedy": ANEW[1]
    }  # fmt: skip
    assert boot(world, tmp_path / "next boot") == []


@pytest.mark.parametrize("broken", ["index", "point_index"])
def test_a_damaged_index_that_cannot_be_made_anew_is_a_problem_that_says_why(tmp_path: Path, broken: str) -> None:
    world = booted()
    world.damaged.add(world.indexes[R1.id])
    error = OperationError(ErrorCode.INTERNAL, f"cannot {broken}")
    world.fail_when = lambda call, w: error if call[0] == broken else None
    assert boot(world, tmp_path / "marker")[:2] == [NOT_ANEW[0], f"cannot {broken}"]
    assert json.loads((tmp_path / "marker").read_text())[0]["remedy"] == NOT_ANEW[1]
    assert "pose.service" in world.running


def test_what_is_masked_or_left_out_here_is_not_started_and_no_problem(tmp_path: Path) -> None:
    world = booted()
    world.masked = {"pose.service"}
    assert boot(world, tmp_path / "masked") == []
    without_app = disable(R1, "pose-app")
    world.runtimes[without_app.id], world.indexes[without_app.id] = without_app, world.indexes[R1.id]
    world.active, world.shown = without_app.id, dict.fromkeys(Kind, without_app.id)
    world.masked, world.missing = set(), {"pose.service"}
    assert boot(world, tmp_path / "left out") == []
    assert world.running == {}


@pytest.mark.parametrize("broken", ["index", "show", "run", "relations"])
def test_what_fails_is_said_and_the_services_start_all_the_same(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = booted()
    world.indexes.clear()
    error = OperationError(ErrorCode.INTERNAL, f"cannot {broken}")
    world.fail_when = lambda call, w: error if call[0] == broken else None

    def relations(self: Any, names: list[str]) -> Any:
        raise error

    if broken == "relations":
        monkeypatch.setattr(FakeUnits, "relations", relations)
    assert f"cannot {broken}" in boot(world, tmp_path / "marker") or broken == "relations"
    assert "pose.service" in world.running

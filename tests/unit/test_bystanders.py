"""Which units stop with an image that do not own it, and in which order units start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.bystanders import BystanderFinder
from agent.contract.errors import ErrorCode, OperationError
from agent.health import UnitState
from agent.order import Relations, in_start_order
from agent.plan import Bystanders
from agent.ports.protocols import MappedFiles, Process
from tests.change.sets import runtime

R1 = runtime("1")
APP = next(extension for extension in R1.extensions if extension.name == "pose-app")
LIBRARY = "/usr/lib/avocado/pose/libpose.so"


@dataclass
class Board:
    """What the finder asks: `carries` are the files of the image, `stops` what goes down with a unit."""

    mapped: dict[str, set[str]] = field(default_factory=dict)
    carries: set[str] = field(default_factory=lambda: {LIBRARY})
    stops: dict[str, set[str]] = field(default_factory=dict)
    inactive: set[str] = field(default_factory=set)
    jobs: set[str] = field(default_factory=set)
    unread: tuple[Process, ...] = ()
    damaged: bool = False
    sparing: dict[str, set[str]] = field(default_factory=dict)  # KillMode=process, and what the main process maps

    def by_service(self) -> MappedFiles:
        mains = {100 + at: frozenset(paths) for at, paths in enumerate(self.sparing.values())}
        return MappedFiles({unit: frozenset(paths) for unit, paths in self.mapped.items()}, self.unread, mains)

    def carried(self, image: Path, paths: Sequence[str]) -> frozenset[str]:
        if self.damaged:
            raise OperationError(ErrorCode.BAD_IMAGE, "cannot look into it")
        return frozenset(self.carries) & frozenset(paths)

    def relations(self, names: Sequence[str]) -> dict[str, Relations]:
        return {name: Relations(stops=frozenset(self.stops.get(name, ()))) for name in names}

    def states(self, names: Sequence[str]) -> dict[str, UnitState]:
        active = {name: "inactive" if name in self.inactive else "active" for name in names}
        mains = {name: 100 + at for at, name in enumerate(self.sparing)}
        return {
            name: UnitState(
                name,
                "loaded",
                active[name],
                "",
                "",
                mains.get(name, 1),
                0,
                is_job=name in self.jobs,
                spares_others=name in mains,
            )
            for name in names
        }

    def find(self, owned: Sequence[str] = ("pose.service",)) -> Bystanders:
        store: Any = SimpleNamespace(image=lambda image_id: Path("/state/images/x.raw"))
        parts: Any = self
        return BystanderFinder(parts, parts, store, parts).find([APP], owned)


def test_a_service_that_maps_a_file_of_the_image_stops_with_it() -> None:
    assert Board({"viewer.service": {LIBRARY}, "sshd.service": {"/usr/lib/libc.so.6"}}).find().units == (
        "viewer.service",
    )


def test_a_file_of_an_overlay_that_was_replaced_is_shown_without_its_root() -> None:
    assert Board({"viewer.service": {LIBRARY.removeprefix("/usr")}}).find().units == ("viewer.service",)


@pytest.mark.parametrize("unit", ["avocadod.service", "dbus.service", "dbus-broker.service"])
def test_what_the_change_itself_runs_on_is_never_stopped(unit: str) -> None:
    assert Board({unit: {LIBRARY}}, stops={"pose.service": {unit}}).find().units == ()


def test_what_goes_down_with_a_stopped_unit_is_stopped_and_started_too_where_it_runs() -> None:
    board = Board(stops={"pose.service": {"a.service", "idle.service"}, "a.service": {"b.service"}})
    board.inactive = {"idle.service"}
    assert board.find().units == ("a.service", "b.service")


def test_a_damaged_image_and_a_process_that_cannot_be_read_are_no_reason_to_stay() -> None:
    hung = Process(12, "python3", "D", "simnpu_wait", "other.service")
    board = Board({"viewer.service": {LIBRARY}}, damaged=True, unread=(hung,))
    assert board.find() == Bystanders(unread=("pid 12 (python3, state D in simnpu_wait) of other.service",))


def test_a_job_that_ends_by_itself_is_named_and_left_alone_where_it_is_no_units_own() -> None:
    board = Board({"backup.service": {LIBRARY}, "viewer.service": {LIBRARY}, "pose.service": {LIBRARY}})
    board.jobs = {"backup.service", "pose.service", "nightly.service"}
    board.stops = {"viewer.service": {"nightly.service", "kiosk.service"}}
    assert board.find() == Bystanders(("viewer.service", "kiosk.service"), jobs=("backup.service",))


def test_a_session_that_outlives_a_stop_of_its_sshd_stops_no_sshd() -> None:
    board = Board({"ssh.service": {LIBRARY}, "spooler.service": {LIBRARY}})
    board.sparing = {"ssh.service": {"/usr/sbin/sshd"}, "spooler.service": {LIBRARY}}
    assert board.find().units == ("spooler.service",)


def test_nothing_leaves_and_nobody_is_asked() -> None:
    nobody: Any = None
    assert BystanderFinder(nobody, nobody, nobody, nobody).find([], ["pose.service"]) == Bystanders()


@pytest.mark.parametrize(
    ("after", "order"),
    [
        ({}, ["c", "a", "b"]),
        ({"c": {"a"}}, ["a", "c", "b"]),
        ({"c": {"a"}, "a": {"b"}}, ["b", "a", "c"]),
        ({"c": {"elsewhere.target"}}, ["c", "a", "b"]),
        ({"c": {"a"}, "a": {"c"}}, ["a", "c", "b"]),
    ],
)
def test_units_start_behind_what_they_are_started_after(after: dict[str, set[str]], order: list[str]) -> None:
    relations = {name: Relations(after=frozenset(names)) for name, names in after.items()}
    assert in_start_order(["c", "a", "b"], relations) == order


@pytest.mark.parametrize(
    ("after", "order"),
    [
        ({}, ["b", "c", "a"]),
        ({"b": {"a"}}, ["a", "b", "c"]),
        ({"c": {"b"}}, ["b", "c", "a"]),
        ({"b": {"a"}, "a": {"c"}}, ["c", "a", "b"]),
    ],
)
def test_the_unit_that_matters_most_starts_as_early_as_that_allows(
    after: dict[str, set[str]], order: list[str]
) -> None:
    relations = {name: Relations(after=frozenset(names)) for name, names in after.items()}
    assert in_start_order(["c", "a", "b"], relations, first="b") == order

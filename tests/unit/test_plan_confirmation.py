"""A change of /etc that comes from afar waits for somebody to come back over a new connection."""

from __future__ import annotations

from typing import Any

import pytest

from agent.extensions import Kind, MergedSet
from agent.plan import ChangeKind, Wanted, plan_change
from tests.change.sets import runtime, with_keys
from tests.plans import (
    R1,
    R2,
    board,
    image,
    links,
    step,
)


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

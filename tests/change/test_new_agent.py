"""A change that brings a new agent leaves the running one alone; the next boot has only the new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from agent.change.record import Outcome
from agent.change.steps.absence import Absence
from agent.change.steps.confirm_health import ConfirmHealth
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Manifest
from agent.health import UnitState
from agent.plan import ChangeKind, Wanted
from tests.change.fakes import FakeClock, FakeInference, FakeUnits
from tests.change.sets import runtime
from tests.change.stories import R1, R2, R3, board, deploy
from tests.change.wired import run
from tests.change.world import World

BOTH = runtime("4", pose_model="2", avocado_agent="3")
CHECK = ("run", "/usr/bin/avocadod", "--check")
REMEDY = "See why: journalctl -u avocado-run-1"


def broken(result: str, **facts: int) -> OperationError:
    return OperationError(ErrorCode.UNIT_FAILED, f"cannot run /usr/bin/avocadod --check: {result}", REMEDY, facts)


@pytest.mark.parametrize(
    ("result", "facts"),
    [("exit-code", {"exit_status": 1}), ("exit-code", {"exit_status": 78}), ("signal", {}), ("timeout", {})],
)
def test_an_agent_that_would_not_start_is_not_kept(result: str, facts: dict[str, int]) -> None:
    world = board(R1)
    world.fail_when = lambda call, _: broken(result, **facts) if call == CHECK else None
    record = run(world, deploy(R3)())
    assert (record.outcome, world.active, world.shown["sysext"]) == (Outcome.REVERTED, R1.id, R1.id)
    assert record.reason is not None
    assert (record.reason.code, record.reason.message, record.reason.remedy) == (
        ErrorCode.UNHEALTHY,
        "cannot confirm the new set: the agent that it brings would not start:"
        f" cannot run /usr/bin/avocadod --check: {result}",
        REMEDY,
    )


def test_an_agent_that_is_too_old_for_the_question_is_no_broken_one() -> None:
    world = board(R3, previous=R1)
    world.fail_when = lambda call, _: broken("exit-code", exit_status=2) if call == CHECK else None
    record = run(world, Wanted(ChangeKind.ROLLBACK, R1))
    assert (record.outcome, world.active, world.calls.count(CHECK)) == (Outcome.APPLIED, R1.id, 1)
    assert [step.warning for step in record.steps if step.kind == "confirm_health"] == [
        "the agent that the set brings could not be asked whether it would start: it is too old"
    ]


@pytest.mark.parametrize("kind", [ChangeKind.REFRESH, ChangeKind.MERGE])
def test_the_set_that_boots_anyway_is_merged_again_whatever_its_agent_says(kind: ChangeKind) -> None:
    """It is the remedy for a board that is stuck."""
    world = board(R1, merged=kind is ChangeKind.REFRESH)
    world.fail_when = lambda call, _: broken("exit-code", exit_status=1) if call == CHECK else None
    record = run(world, Wanted(kind, None))
    assert (record.outcome, world.calls.count(CHECK)) == (Outcome.APPLIED, 0)


def test_the_question_does_not_keep_the_services_return_from_being_seen() -> None:
    away = {}
    for takes_s in (0, 45):
        world = board(R1)

        def ask(call: tuple, world: World, takes_s: int = takes_s) -> None:
            if call == CHECK:
                world.now_s += takes_s

        world.fail_when = ask
        record = run(world, deploy(BOTH)())
        assert (record.outcome, world.calls.count(CHECK)) == (Outcome.APPLIED, 1)
        away[takes_s] = record.facts["away_s"]
    assert away[45] == away[0] < 1


@pytest.mark.parametrize(("to", "asked"), [(R3, 1), (R2, 0)])
def test_the_new_set_is_asked_for_its_agent_where_that_is_another_one(to: Manifest, asked: int) -> None:
    world = board(R1)
    record = run(world, deploy(to)())
    assert record.outcome is Outcome.APPLIED
    assert world.calls.count(CHECK) == asked
    if asked:
        assert world.calls.index(("show", to.id)) < world.calls.index(CHECK) < world.calls.index(("activate", to.id))


@dataclass
class UnitsWithABadFile(FakeUnits):
    """systemd could not read the agent's unit file."""

    load: str = "bad-setting"

    def states(self, names: Sequence[str]) -> dict[str, UnitState]:
        return {name: replace(state, load=self.load) for name, state in super().states(names).items()}


@pytest.mark.parametrize("load", ["bad-setting", "error"])
def test_a_unit_of_the_agent_that_systemd_cannot_read_is_not_kept(load: str) -> None:
    world, unused = board(R1), None
    clock: Any = FakeClock(world)
    affected: Any = unused
    report: Any = unused
    step = ConfirmHealth(UnitsWithABadFile(world, load), affected, FakeInference(world), clock, Absence(clock))
    with pytest.raises(OperationError) as caught:
        step.do({"brings_agent": True}, {"units": []}, report)
    assert (caught.value.code, caught.value.message, caught.value.remedy) == (
        ErrorCode.UNHEALTHY,
        f"cannot confirm the new set: avocadod.service that it brings is {load}",
        "Correct it, with: systemd-analyze verify avocadod.service",
    )

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
from tests.change.fakes import FakeClock, FakeInference, FakeUnits
from tests.change.stories import R1, R2, R3, board, deploy
from tests.change.wired import run

CHECK = ("run", "/usr/bin/avocadod", "--check")
BROKEN = OperationError(
    ErrorCode.UNIT_FAILED, "cannot run /usr/bin/avocadod --check: exit-code", "See why: journalctl -u avocado-run-1"
)


def test_an_agent_that_would_not_start_is_not_kept() -> None:
    world = board(R1)
    world.fail_when = lambda call, _: BROKEN if call == CHECK else None
    record = run(world, deploy(R3)())
    assert (record.outcome, world.active, world.shown["sysext"]) == (Outcome.REVERTED, R1.id, R1.id)
    assert record.reason is not None
    assert (record.reason.code, record.reason.message, record.reason.remedy) == (
        ErrorCode.UNHEALTHY,
        "cannot confirm the new set: the agent that it brings would not start:"
        " cannot run /usr/bin/avocadod --check: exit-code",
        BROKEN.remedy,
    )


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
        step.do({"images": [{"name": "avocado-agent"}]}, {"units": []}, report)
    assert (caught.value.code, caught.value.message, caught.value.remedy) == (
        ErrorCode.UNHEALTHY,
        f"cannot confirm the new set: avocadod.service that it brings is {load}",
        "Correct it, with: systemd-analyze verify avocadod.service",
    )

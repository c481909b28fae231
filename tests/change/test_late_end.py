"""The end of a change that the disk did not take: written later, by one thread, and no start before that undoes it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from agent.change.engine import Engine
from agent.change.record import ChangeRecord, Outcome, Phase
from agent.contract.errors import ErrorCode, OperationError
from agent.extensions import Kind
from agent.plan import ChangeKind, Wanted
from tests.change.fake_disk import FakeJournal
from tests.change.stories import R0, R1, R2, board, deploy
from tests.change.wired import change_on, engine_on
from tests.change.world import World

FULL = OperationError(ErrorCode.NO_SPACE, "cannot write: the disk is full")


@pytest.mark.parametrize("by_itself", [False, True])
def test_the_end_of_a_change_that_the_disk_did_not_take_is_written_before_the_next_one_begins(by_itself: bool) -> None:
    world = board(R1, previous=R0)
    full = False

    def refuse(call: Any, world: World) -> OperationError | None:
        return (
            OperationError(ErrorCode.NO_SPACE, "cannot write: the disk is full")
            if call[0] == "journal" and full
            else None
        )

    world.fail_when = refuse
    engine = engine_on(world)

    def is_the_end(record: ChangeRecord) -> None:
        nonlocal full
        full = full or (record.step is not None and record.step.kind == "prune")

    deploying, rolling_back = change_on(world, deploy(R2)()), None
    assert engine.run(deploying, is_the_end, lambda: False).outcome is Outcome.APPLIED
    assert world.records[1].outcome is Outcome.RUNNING
    rolling_back = change_on(world, Wanted(ChangeKind.ROLLBACK, R1))
    with pytest.raises(OperationError):
        engine.run(rolling_back, lambda _: None, lambda: False)
    with pytest.raises(OperationError):
        engine.write_late()
    full = False
    if by_itself:  # the agent tries now and then, so that nobody reads for long that it still runs
        engine.write_late()
        assert world.records[1].outcome is Outcome.APPLIED
    assert engine.run(rolling_back, lambda _: None, lambda: False).outcome is Outcome.APPLIED
    assert [world.records[number].outcome for number in (1, 2)] == [Outcome.APPLIED, Outcome.APPLIED]


def ended_unwritten(world: World, wanted: Wanted, engine: Engine) -> ChangeRecord:
    """A change whose every step is on the disk and whose end is not."""

    def ends(world: World) -> bool:
        return bool(world.records) and all(step.phase is Phase.DONE for step in world.records[1].steps)

    def refuse(call: Any, world: World) -> OperationError | None:
        return FULL if call[0] == "journal" and ends(world) else None

    world.fail_when = refuse
    record = engine.run(change_on(world, wanted), lambda _: None, lambda: False)
    world.fail_when = lambda call, world: None
    assert (record.outcome, world.records[record.number].outcome) == (Outcome.APPLIED, Outcome.RUNNING)
    return record


@pytest.mark.parametrize("reboots", [False, True])
@pytest.mark.parametrize("kind", [ChangeKind.UNMERGE, ChangeKind.MERGE, ChangeKind.REFRESH])
def test_a_change_that_was_told_applied_is_not_undone_by_the_next_start(kind: ChangeKind, reboots: bool) -> None:
    world = board(R1, merged=kind is not ChangeKind.MERGE)
    ended_unwritten(world, Wanted(kind, None), engine_on(world))
    if reboots:
        world.power_cut(lose_unsynced=False)
    shown, running, calls = dict(world.shown), dict(world.running), len(world.calls)
    record = engine_on(world).recover(lambda _: None)
    assert record
    assert (record.outcome, world.records[1].outcome) == (Outcome.APPLIED, Outcome.APPLIED)
    assert (world.shown, world.running) == (shown, running)
    assert {call[0] for call in world.calls[calls:]} == {"journal"}


def test_a_change_whose_last_step_was_not_done_is_still_undone() -> None:
    world = board(R1)
    ended_unwritten(world, Wanted(ChangeKind.UNMERGE, None), engine_on(world))
    world.records[1] = world.records[1].with_step(len(world.records[1].steps) - 1, phase=Phase.DOING)
    record = engine_on(world).recover(lambda _: None)
    assert record
    assert (record.outcome, set(world.shown.values())) == (Outcome.REVERTED, {R1.id})
    assert world.shown[Kind.SYSEXT] == world.active


class OneAtATime(FakeJournal):
    """Does something while it writes, and notices a second write meanwhile."""

    writing = False
    overlaps = 0
    meanwhile: Any = None

    def save(self, record: ChangeRecord) -> None:
        self.overlaps += self.writing
        self.writing = True
        try:
            if self.meanwhile is not None:
                meanwhile, self.meanwhile = self.meanwhile, None
                meanwhile()
            super().save(record)
        finally:
            self.writing = False


@pytest.mark.parametrize("first", ["status", "change"])
def test_the_status_and_the_next_change_do_not_write_the_late_end_at_once(first: str) -> None:
    world = board(R1)
    journal = OneAtATime(world)
    engine = engine_on(world, journal=journal)
    ended_unwritten(world, Wanted(ChangeKind.UNMERGE, None), engine)
    merge = change_on(world, Wanted(ChangeKind.MERGE, None))
    records: list[ChangeRecord] = []
    works = {
        "status": engine.write_late,
        "change": lambda: records.append(engine.run(merge, lambda _: None, lambda: False)),
    }
    second = threading.Thread(target=works["change" if first == "status" else "status"])

    def begin_second() -> None:
        second.start()
        second.join(0.2)  # it waits for the first, or has nothing to do

    journal.meanwhile = begin_second
    works[first]()
    second.join(10)
    assert journal.overlaps == 0
    assert [record.outcome for record in records] == [Outcome.APPLIED]
    assert [world.records[number].outcome for number in (1, 2)] == [Outcome.APPLIED, Outcome.APPLIED]

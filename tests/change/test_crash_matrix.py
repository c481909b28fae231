"""Cut before, after and inside every effect and every journal write; the board is wholly old or wholly new, and serves.

The matrix runs every story with every fault, cut in three ways, and cut again in the recovery. Here the ticks are a
seeded choice; `make test-long` cuts at every tick. Then each law of the engine is broken in turn, and the matrix has to
notice.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest

from agent.change import engine as engine_module
from agent.change.engine import Engine
from agent.change.record import ChangeRecord, Outcome, Phase
from agent.plan import StepSpec
from tests.change.fake_disk import FakeJournal
from tests.change.stories import (
    BYSTANDER_FAULT,
    FAULTS,
    NO_FAULT,
    STORIES,
    TRIAL_FAULTS,
    UNDO_FAULTS,
    UNMERGE_FROM_AFAR,
    WARMED_UP,
    CutKind,
    Fault,
    Run,
    Story,
    plan_of,
)
from tests.change.wired import engine_on
from tests.change.world import World

SEED = 20261130
MakeEngine = Callable[..., Engine]
DEPLOY = STORIES[0]
WATCHED = next(story for story in STORIES if story.name == "deploy under a viewer")
AGENT_ONLY = next(story for story in STORIES if story.name == "deploy agent only")


def ticks(rate: int, chance: random.Random) -> Iterator[int]:
    """About one tick in `rate`, or every one."""
    at = 0
    while True:
        at += chance.randint(1, 2 * rate - 1)
        yield at


def scenarios(story: Story, fault: Fault, make_engine: MakeEngine, rates: tuple[int, int]) -> Iterator[Run]:
    """Every scenario of one story and fault: no cut, one cut, and a cut of the recovery."""
    chance = random.Random(f"{SEED} {story.name} {fault.name}")
    yield Run(story, fault, [], make_engine)
    for kind in CutKind:
        for at in ticks(rates[0], chance):
            once = Run(story, fault, [(at, kind)], make_engine)
            yield once
            if not once.blown:
                break
            for again in ticks(rates[1], chance):
                twice = Run(story, fault, [(at, kind), (again, chance.choice(list(CutKind)))], make_engine)
                yield twice
                if twice.blown < 2:
                    break


def played(
    make_engine: MakeEngine,
    rates: tuple[int, int],
    stories: Sequence[Story] = STORIES,
    faults: Sequence[Fault] = FAULTS,
    plan: Callable[[Story], list[StepSpec]] = plan_of,
) -> Iterator[list[str]]:
    """What is broken in each scenario. `rates`: one tick in how many, for the first cut and for the second."""
    for story, fault in itertools.product(stories, faults):
        for run in scenarios(story, fault, make_engine, rates):
            run.plan = plan
            run.play()
            yield [f"{story.name}, {fault.name} fails, cut at {list(run.cuts)}: {what}" for what in run.broken()]


def assert_whole(scenarios: Iterable[list[str]], *, least: int) -> None:
    ran, broken = 0, []
    for found in scenarios:
        ran += 1
        broken += found
    print(f"{ran} scenarios, {len(broken)} broken")  # pytest -rP shows it
    assert not broken, "\n".join(broken[:20])
    assert ran >= least


def notices(make_engine: MakeEngine = engine_on, plan: Callable[[Story], list[StepSpec]] = plan_of) -> str:
    """The first thing the matrix finds broken in a deploy, or nothing."""
    faults = [
        fault for fault in FAULTS if fault.name in ("nothing", "cpu", "start", "switch", "first sync after activate")
    ]
    return next((found[0] for found in played(make_engine, (3, 1000), [DEPLOY], faults, plan) if found), "")


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_the_board_is_old_or_new_wherever_it_is_cut(story: Story) -> None:
    assert_whole(played(engine_on, (15, 40), [story]), least=150)


def test_the_board_is_old_or_new_where_a_model_is_tried_first() -> None:
    assert "warm_up" in {step.kind for step in plan_of(WARMED_UP)}
    assert_whole(played(engine_on, (5, 40), [WARMED_UP], TRIAL_FAULTS), least=150)


def test_an_undo_that_fails_ends_stuck_with_a_remedy_and_no_more_motion() -> None:
    assert_whole(played(engine_on, (8, 40), [DEPLOY], UNDO_FAULTS), least=100)


def test_an_unmerge_from_afar_is_wholly_undone_wherever_it_is_cut_unless_its_host_comes_back() -> None:
    faults = [fault for fault in FAULTS if fault.name in ("nothing", "no confirmation", "switch")]
    assert_whole(played(engine_on, (4, 40), [UNMERGE_FROM_AFAR], faults), least=60)


def test_a_bystander_that_stays_down_after_going_back_stands_in_the_record() -> None:
    assert_whole(played(engine_on, (8, 40), [WATCHED], [BYSTANDER_FAULT]), least=30)


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("story", [*STORIES, WARMED_UP], ids=lambda story: story.name)
def test_the_board_is_old_or_new_cut_at_every_tick(story: Story) -> None:
    faults = FAULTS + UNDO_FAULTS if story is DEPLOY else FAULTS
    assert_whole(played(engine_on, (1, 15), [story], faults), least=3000)


@pytest.mark.parametrize(("story", "too_late"), [(DEPLOY, "activate"), (AGENT_ONLY, "show")], ids=["waits", "alone"])
@pytest.mark.parametrize("cancel_at", range(1, 25))
def test_a_cancelled_change_is_wholly_reverted_or_was_too_late(cancel_at: int, story: Story, too_late: str) -> None:
    run = Run(story, NO_FAULT, [], cancel_at=cancel_at)
    world = run.play()
    assert run.broken() == []
    record = world.records[1]
    late = any(call == (too_late, record.to_runtime) for call in world.calls)
    assert record.outcome is (Outcome.APPLIED if late else Outcome.CANCELLED)


def test_a_recovery_that_never_gets_through_ends_stuck() -> None:
    cuts = [(60, CutKind.KILL), *[(3, CutKind.KILL)] * 5]
    world = Run(DEPLOY, NO_FAULT, cuts).play()
    record = world.records[1]
    assert record.outcome is Outcome.STUCK
    assert record.attempts == 6
    assert record.reason
    assert record.reason.remedy.startswith("Run 'avocadoctl history show 1'")


# --- one law broken at a time ---


class ForgetfulJournal(FakeJournal):
    """Loses the write that says `doing`: no write ahead of the effect."""

    def save(self, record: ChangeRecord) -> None:
        if record.step is None or record.step.phase is not Phase.DOING:
            super().save(record)


class MemolessJournal(FakeJournal):
    """Writes the memo only once the step is done."""

    def save(self, record: ChangeRecord) -> None:
        for index, step in enumerate(record.steps):
            if step.phase is Phase.DOING:
                record = record.with_step(index, memo={key: _empty(value) for key, value in step.memo.items()})
        super().save(record)


def _empty(value: object) -> object:
    return type(value)() if isinstance(value, list | dict | bool) else None


def _reverts_past_the_commit(handlers: object, record: object) -> bool:
    return False


def _believes_the_journal(handlers: object, step: object) -> bool:
    return False


def _activates_before_the_proof(story: Story) -> list[StepSpec]:
    steps = plan_of(story)
    activate = [step for step in steps if step.kind == "activate"]
    rest = [step for step in steps if step.kind != "activate"]
    at = next(n for n, step in enumerate(rest) if step.kind == "switch_overlay")
    return [*rest[:at], *activate, *rest[at:]]


def _believes_that_all_was_done(handlers: object, record: ChangeRecord) -> bool:
    return not record.reverting


LAWS: dict[str, tuple[str, object]] = {
    "the failing step is undone too": ("_UNDOABLE", (Phase.DONE, Phase.UNDOING)),
    "recovery asks the device whether it committed": ("Handlers.is_committed_by", _believes_the_journal),
    "after the commit a restart only finishes": ("Handlers.commit_happened", _reverts_past_the_commit),
    "only a change whose every step is done was over": ("Handlers.was_over", _believes_that_all_was_done),
}


@pytest.mark.parametrize("law", LAWS)
def test_the_matrix_notices_when_the_engine_breaks_this_law(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken_one = LAWS[law]
    owner, _, attribute = name.rpartition(".")
    monkeypatch.setattr(getattr(engine_module, owner) if owner else engine_module, attribute, broken_one)
    assert notices()


@pytest.mark.parametrize("journal", [ForgetfulJournal, MemolessJournal])
def test_the_matrix_notices_when_the_journal_breaks_its_law(journal: type[FakeJournal]) -> None:
    def make(world: World, **settings: object) -> Engine:
        return engine_on(world, journal=journal(world), **settings)

    assert notices(make)


def test_the_matrix_notices_when_the_commit_comes_before_the_proof() -> None:
    assert notices(plan=_activates_before_the_proof)


def test_the_matrix_notices_when_a_reboot_is_not_told_from_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.change.fakes.FakeClock.boot_id", lambda self: "always the same")
    assert "does not say that power was lost" in notices()


def test_the_matrix_finds_nothing_in_the_engine_as_it_is() -> None:
    assert notices() == ""

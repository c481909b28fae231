"""Requests: one change at a time, in a thread of its own, with a plan that may refuse before anything is touched."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.change.confirmation import Confirmation
from agent.change.engine import Engine
from agent.change.journal import Journal
from agent.change.record import ChangeRecord, NewChange
from agent.change.step import Shutdown
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Extension
from agent.extensions import MergedSet
from agent.health import InferenceState
from agent.plan import Bystanders, ChangeKind, Observed, StepSpec, Wanted
from agent.ports.clock import SystemClock
from agent.ports.files import write_durably
from agent.ports.protocols import Kind
from agent.requests import Ask, Changes, OpenSources, Planner
from tests.change.sets import OS_RELEASE, releases, runtime

REFRESH = Ask(ChangeKind.REFRESH, "root")


class Gate:
    """A step that waits until the test lets it through."""

    kind = "gate"
    commits = False
    volatile = False
    cancellable = True

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.ends: BaseException | None = None

    def prepare(self, inputs: Any) -> dict[str, Any]:
        return {}

    def do(self, inputs: Any, memo: Any, report: Any) -> None:
        self.reached.set()
        assert self.open.wait(10)
        if self.ends is not None:
            raise self.ends
        report.progress(1, 1)

    def undo(self, inputs: Any, memo: Any, report: Any) -> None:
        return


class FixedPlan(Planner):
    """A planner whose plan the test sets."""

    def __init__(self, plan: Callable[[], NewChange]) -> None:
        self._plan = plan

    def plan(self, ask: Ask) -> NewChange:
        return self._plan()


def gated() -> NewChange:
    return NewChange("refresh", "root", None, None, [StepSpec("gate")])


class Rig:
    """Changes over a real engine and journal, with one gate for a step."""

    def __init__(self, folder: Path, plan: Callable[[], NewChange] = gated) -> None:
        self.gate = Gate()
        self.journal = Journal(folder / "changes", write_durably)
        self.news: list[ChangeRecord] = []
        self.cleaned = 0
        cancelled = threading.Event()
        self.confirmation = Confirmation()
        engine = Engine(self.journal, {"gate": self.gate, "await_confirmation": self.gate}, SystemClock())
        self.changes = Changes(engine, FixedPlan(plan), cancelled, self._cleanup, self.news.append, self.confirmation)

    def _cleanup(self) -> None:
        self.cleaned += 1

    async def started(self) -> None:
        await self.changes.start_with(lambda tell: None)

    async def idle(self) -> None:
        await self.changes.interrupted(10)
        assert not self.changes.busy


def test_a_second_request_is_refused_and_names_the_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path)
        await rig.started()
        first = await rig.changes.begin(REFRESH)
        assert (first.number, first.outcome) == (1, "running")
        with pytest.raises(OperationError) as caught:
            await rig.changes.begin(REFRESH)
        assert caught.value.code is ErrorCode.CHANGE_RUNNING
        assert caught.value.message == "cannot begin another change: change 1 (refresh) is at work"
        assert caught.value.facts == {"change": 1}
        rig.gate.open.set()
        await rig.idle()
        assert rig.news[-1].outcome == "applied"
        assert (await rig.changes.begin(REFRESH)).number == 2
        await rig.idle()
        assert rig.cleaned == 3  # the start is one, too

    asyncio.run(scenario())


def test_a_request_that_comes_before_the_start_is_finished_waits_for_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path)
        go, waited = threading.Event(), []
        start = asyncio.create_task(rig.changes.start_with(lambda tell: waited.append(go.wait(10))))
        request = asyncio.create_task(rig.changes.begin(REFRESH))
        await asyncio.sleep(0.05)
        assert not request.done()
        go.set()
        await start
        assert waited == [True]
        assert (await request).number == 1
        rig.gate.open.set()
        await rig.idle()

    asyncio.run(scenario())


def test_a_plan_that_refuses_tells_the_caller_and_leaves_no_record(tmp_path: Path) -> None:
    def refuse() -> NewChange:
        raise OperationError(ErrorCode.WRONG_TARGET, "cannot deploy: other board")

    async def scenario() -> None:
        rig = Rig(tmp_path, refuse)
        await rig.started()
        with pytest.raises(OperationError, match="other board"):
            await rig.changes.begin(REFRESH)
        assert (rig.journal.numbers(), rig.changes.busy, rig.cleaned) == ([], False, 2)

    asyncio.run(scenario())


def test_a_change_is_cancelled_where_it_may_be_and_nowhere_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path)
        await rig.started()
        with pytest.raises(OperationError, match="cannot cancel change 1: it is not running"):
            rig.changes.cancel(1)
        await rig.changes.begin(REFRESH)
        assert await asyncio.to_thread(rig.gate.reached.wait, 10)
        rig.gate.cancellable = False
        with pytest.raises(OperationError) as caught:
            rig.changes.cancel(1)
        assert caught.value.message == "cannot cancel change 1: it has reached gate, and now ends by itself"
        rig.gate.cancellable = True
        rig.changes.cancel(1)
        rig.gate.open.set()
        await rig.idle()
        assert rig.journal.load(1).outcome == "cancelled"

    asyncio.run(scenario())


def test_only_a_change_that_waits_for_a_confirmation_takes_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path, lambda: replace(gated(), steps=[StepSpec("await_confirmation")]))
        await rig.started()
        with pytest.raises(OperationError, match="cannot confirm change 1: it does not wait for a confirmation"):
            rig.changes.confirm(1)
        await rig.changes.begin(REFRESH)
        assert await asyncio.to_thread(rig.gate.reached.wait, 10)
        await asyncio.sleep(0)  # the record of the step comes to the loop
        assert not rig.confirmation.given()
        rig.changes.confirm(1)
        assert rig.confirmation.given()
        rig.gate.open.set()
        await rig.idle()
        with pytest.raises(OperationError, match="cannot confirm change 1"):
            rig.changes.confirm(1)

    asyncio.run(scenario())


def test_an_agent_that_stops_leaves_the_change_as_its_journal_has_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path)
        rig.gate.ends = Shutdown()
        await rig.started()
        await rig.changes.begin(REFRESH)
        rig.gate.open.set()
        await rig.changes.interrupted(10)
        left = rig.journal.load(1)
        assert (left.outcome, left.steps[0].phase) == ("running", "doing")

    asyncio.run(scenario())


def planner(observed: Observed, *, warm_up: bool = False) -> Planner:
    class Stub:
        def observe(self, journal: object) -> Observed:
            return observed

        def find(self, leaving: Sequence[Extension], owned: Iterable[str]) -> Bystanders:
            return Bystanders(("viewer.service",) if any(e.name == "pose-app" for e in leaving) else ())

    return Planner(Stub(), None, OpenSources(lambda source: None), Stub(), warm_up=warm_up)  # type: ignore[arg-type]


def test_the_active_runtime_deployed_again_brings_the_image_that_is_lost_behind_its_name() -> None:
    observed = board()
    manifest = observed.runtimes[observed.active or ""]
    good = {e.image_id: e.size_bytes for e in manifest.extensions if e.name != "pose-model"}

    class Again(Planner):
        def _wanted(self, ask: Ask, observed: Observed) -> Wanted:
            return Wanted(ask.kind, manifest, ask.source)

    class Board:
        disk = SimpleNamespace(good_images=lambda extensions: good)

        def observe(self, journal: object) -> Observed:
            return observed

        def find(self, leaving: object, owned: object) -> Bystanders:
            return Bystanders()

    asked = Again(Board(), None, OpenSources(lambda source: None), Board())  # type: ignore[arg-type]
    steps = [step.kind for step in asked.plan(Ask(ChangeKind.DEPLOY, "root", source="unix:/x")).steps]
    assert steps[:2] == ["fetch_images", "stage_runtime"]
    # What nobody uses makes room for it, as for any other runtime.
    observed = replace(observed, images=observed.images | {"unused": 1 << 30}, free_bytes=1 << 20)
    assert asked.plan(Ask(ChangeKind.DEPLOY, "root", source="unix:/x")).steps[0].kind == "prune"
    good |= {e.image_id: e.size_bytes for e in manifest.extensions}
    assert asked.plan(Ask(ChangeKind.DEPLOY, "root", source="unix:/x")).steps == []


def board() -> Observed:
    with_agent, without = runtime("1"), runtime("2", avocado_agent="")
    links = {(Kind(k), with_agent.link_name(e)[:-4]) for e in with_agent.extensions for k in e.types}
    return Observed(
        target="virtual",
        arch="x86_64",
        python="3.13",
        agent_version="0.1.0",
        os_release=OS_RELEASE,
        active=with_agent.id,
        previous=None,
        runtimes={with_agent.id: with_agent, without.id: without},
        images={e.image_id: e.size_bytes for m in (with_agent, without) for e in m.extensions},
        releases=releases(with_agent, without),
        merged=MergedSet({kind: tuple(sorted(name for k, name in links if k is kind)) for kind in Kind}),
        free_bytes=1 << 30,
    )


def test_what_would_take_the_agent_away_is_refused_with_the_way_out() -> None:
    observed = board()
    with pytest.raises(OperationError) as unmerge:
        planner(observed).plan(Ask(ChangeKind.UNMERGE, "root"))
    assert unmerge.value.message == "cannot unmerge: the agent itself runs from extension avocado-agent"
    with pytest.raises(OperationError) as disable:
        planner(observed).plan(Ask(ChangeKind.DISABLE, "root", extension="avocado-agent"))
    assert disable.value.message == (
        "cannot disable extension avocado-agent: this board needs it to change anything again"
    )
    assert disable.value.remedy == "See the others: avocadoctl ext list"
    without = next(runtime_id for runtime_id in observed.runtimes if runtime_id != observed.active)
    with pytest.raises(OperationError) as activate:
        planner(observed).plan(Ask(ChangeKind.ACTIVATE, "root", runtime=without))
    assert activate.value.code is ErrorCode.REQUIREMENT_UNMET
    assert activate.value.remedy == "Add avocado-agent to the runtime's extensions in avocado.yaml."


def test_a_dry_run_is_planned_and_is_never_the_last_change(tmp_path: Path) -> None:
    plans = iter([gated(), replace(gated(), plan_only=True)])

    async def scenario() -> None:
        rig = Rig(tmp_path, lambda: next(plans))
        await rig.started()
        await rig.changes.begin(REFRESH)
        rig.gate.open.set()
        await rig.idle()
        planned = await rig.changes.begin(REFRESH)
        await rig.idle()
        assert (planned.number, planned.outcome, planned.steps) == (2, "planned", ())
        assert planned.facts["plan"] == [{"kind": "gate", "inputs": {}}]
        assert rig.changes.record is not None
        assert rig.changes.record.number == 1
        # What the bus shows is the planned one, so that whoever asked can read it.
        assert rig.news[-1].number == 2
        last, _ = rig.journal.last_change()
        assert last is not None
        assert (last.number, [record.number for record in rig.journal.history()[0]]) == (1, [2, 1])

    asyncio.run(scenario())


def test_a_dry_run_makes_the_plan_of_the_change_itself() -> None:
    observed = board()
    change = planner(observed).plan(Ask(ChangeKind.REFRESH, "root", dry_run=True))
    assert change.plan_only
    assert [step.kind for step in change.steps][:3] == ["stop_services", "release_npu", "switch_overlay"]
    assert change.steps[0].inputs["units"] == ["pose.service", "viewer.service"]
    nothing_merged = replace(observed, merged=MergedSet({}))
    kinds = [step.kind for step in planner(nothing_merged).plan(Ask(ChangeKind.MERGE, "root")).steps]
    assert "switch_overlay" in kinds


@pytest.mark.parametrize(
    ("asked", "configured", "tried"),
    [(None, False, False), (None, True, True), (True, False, True), (False, True, False), (False, False, False)],
)
def test_a_model_is_tried_first_as_is_asked_and_else_as_configured(
    *, asked: bool | None, configured: bool, tried: bool
) -> None:
    observed, other = board(), runtime("3", pose_model="3")
    inference = InferenceState("serving", "npu", "ok", "npu", "movenet 1", 9, True, True, ("/dev/simnpu0",), 0.2, 2)
    runtimes = {**observed.runtimes, other.id: other}
    held = {e.image_id: e.size_bytes for m in runtimes.values() for e in m.extensions}
    known = releases(*runtimes.values())
    observed = replace(observed, runtimes=runtimes, images=held, releases=known, inference=inference)
    ask = Ask(ChangeKind.ACTIVATE, "root", runtime=other.id, warm_up=asked)
    kinds = [step.kind for step in planner(observed, warm_up=configured).plan(ask).steps]
    assert ("warm_up" in kinds) is tried

"""The crash matrix's axes: what is asked of which board, what fails, where it is cut, and what must be true at the end.

A story makes a board and asks for a change. A fault is a step that cannot do its work. A cut ends everything at one
tick: `power` keeps the disk, `power-unsynced` keeps only what was synced, `kill` ends the agent and leaves the boot.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from agent.change.engine import Engine
from agent.change.record import ChangeRecord, NewChange, Outcome
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Manifest, image_id
from agent.extensions import Kind
from agent.plan import ChangeKind, StepSpec, Wanted
from tests.change.sets import releases, runtime
from tests.change.wired import engine_on, plan_on
from tests.change.world import Call, Cut, Fuse, World

R0 = runtime("0", pose_model="0")
R1 = runtime("1")
R2 = runtime("2", pose_model="2", pose_config="2")
R3 = runtime("3", avocado_agent="3")  # only the agent's own extension differs


class CutKind(StrEnum):
    """What is left after a cut."""

    POWER = "power"
    POWER_UNSYNCED = "power-unsynced"
    KILL = "kill"


@dataclass(frozen=True, eq=False)
class Story:
    """A board and what is asked of it. `leads_to`: what the board boots and shows when the change is applied."""

    name: str
    make: Callable[[], World]
    wanted: Callable[[], Wanted]
    boots: Manifest | None
    shows: Manifest | None


@dataclass(frozen=True)
class Fault:
    """What fails. `stuck`: it keeps the board from going back, so `stuck` is the expected end of a revert.

    `refreshed_in`: the step during which somebody has systemd merge what `active` names. `loses`: a service that may be
    down after going back, if the record says so.
    """

    name: str
    refuse: Callable[[Call, World], bool] = lambda call, world: False
    bad: str = ""
    stubborn_npu: bool = False
    silent_host: bool = False
    refreshed_in: str = ""
    loses: str = ""
    stuck: bool = False


def board(active: Manifest | None, *others: Manifest, previous: Manifest | None = None, merged: bool = True) -> World:
    """A board that has served `active` for a while."""
    staged = [m for m in (active, previous, *others) if m]
    world = World(
        images={e.image_id for m in staged for e in m.extensions},
        runtimes={m.id: m for m in staged},
        active=active.id if active else None,
        previous=previous.id if previous else None,
        releases=RELEASES,
        unit_files=active.id if active and merged else None,
    )
    for manifest in staged:
        index = next(image_id(e.image_id) for e in manifest.extensions if e.name == "npu-virtual")
        world.indexes[manifest.id] = index
        world.images.add(index)
    world.synced = (world.active, world.previous)
    if active and merged:
        world.shown = dict.fromkeys(Kind, active.id)
        world.running = {"pose.service": (active.id, 0.0)}
    return world


def watched(world: World) -> World:
    """The same board with a service of the base that has a file of an image mapped, and follows the pose service."""
    world.of_the_base = frozenset({"viewer.service"})
    world.after = {"viewer.service": frozenset({"pose.service"})}
    world.running["viewer.service"] = (world.active, 0.0)
    return world


def deploy(manifest: Manifest) -> Callable[[], Wanted]:
    return lambda: Wanted(ChangeKind.DEPLOY, manifest, source="unix:/run/avocado/receive-1.sock")


def sharing(world: World) -> World:
    """The same board with an NPU that serves two at once."""
    world.npu_contexts = 2
    return world


def deploy_warmed_up(manifest: Manifest) -> Callable[[], Wanted]:
    return lambda: replace(deploy(manifest)(), warm_up=True)


STORIES = (
    Story("deploy", lambda: board(R1, previous=R0), deploy(R2), R2, R2),
    Story("deploy under a viewer", lambda: watched(board(R1, previous=R0)), deploy(R2), R2, R2),
    Story("first deploy", lambda: board(None), deploy(R1), R1, R1),
    Story("rollback", lambda: board(R2, previous=R1), lambda: Wanted(ChangeKind.ROLLBACK, R1), R1, R1),
    Story("deploy agent only", lambda: board(R1), deploy(R3), R3, R3),
    Story("refresh", lambda: board(R1), lambda: Wanted(ChangeKind.REFRESH, None), R1, R1),
    Story("unmerge", lambda: board(R1), lambda: Wanted(ChangeKind.UNMERGE, None), R1, None),
    Story("merge", lambda: board(R1, merged=False), lambda: Wanted(ChangeKind.MERGE, None), R1, R1),
    Story(
        "merge from afar",
        lambda: board(R1, merged=False),
        lambda: Wanted(ChangeKind.MERGE, None, await_host=True),
        R1,
        R1,
    ),
)
UNMERGE_FROM_AFAR = Story(
    "unmerge from afar", lambda: board(R1), lambda: Wanted(ChangeKind.UNMERGE, None, await_host=True), R1, None
)
WARMED_UP = Story("deploy, warmed up", lambda: sharing(board(R1, previous=R0)), deploy_warmed_up(R2), R2, R2)

NO_FAULT = Fault("nothing")
RELEASES = releases(R0, R1, R2, R3)


def _doing(*names: str) -> Callable[[Call, World], bool]:
    """This call fails on the way forward, every time."""
    return lambda call, world: call[0] in names and not world.reverting


def _undoing(*names: str) -> Callable[[Call, World], bool]:
    """This call fails on the way back, every time."""
    return lambda call, world: call[0] in names and world.reverting


FAULTS = (
    NO_FAULT,
    Fault("fetch", lambda call, world: call[0] == "fetch" and call[1] in ("pose-model", "avocado-agent")),
    Fault("release file", lambda call, world: call[0] == "release" and call[1] == "pose-config"),
    Fault("module index", _doing("index")),
    Fault("stage", _doing("stage")),
    Fault("check", _doing("check")),
    Fault("stop", _doing("stop")),
    Fault("npu", stubborn_npu=True),
    Fault("switch", _doing("show")),
    Fault("reload", _doing("reload_manager")),
    Fault("modprobe", _doing("run")),
    Fault("start", _doing("start")),
    Fault("wrong result", bad="wrong-result"),
    Fault("cpu", bad="cpu"),
    Fault("hang", bad="hang"),
    Fault("crash loop", bad="crash-loop"),
    Fault("no confirmation", silent_host=True),
    Fault("the overlay changes under the trial", refreshed_in="confirm_health"),
    Fault("the overlay changes while the host comes back", refreshed_in="await_confirmation"),
    Fault("activate", _doing("activate")),
    Fault(
        "first sync after activate",
        lambda call, world: _doing("sync_links")(call, world) and _seen(world, "sync_links") == 1,
    ),
    Fault("settle", _doing("settle")),
    Fault("prune", _doing("remove_image")),
    Fault("one journal write", lambda call, world: call[0] == "journal" and _seen(world, "journal") == 9),
    Fault("journal full", lambda call, world: call[0] == "journal" and _seen(world, "journal") >= 14),
)
UNDO_FAULTS = (
    Fault("undo switch", _undoing("show"), bad="cpu", stuck=True),
    Fault("undo start", _undoing("stop"), bad="cpu", stuck=True),
    Fault("undo stop", _undoing("start"), bad="cpu", stuck=True),
    Fault("undo stage", _undoing("remove"), bad="cpu", stuck=True),
)


TRIAL_FAULTS = (
    *(fault for fault in FAULTS if fault.name in ("nothing", "stage", "stop", "wrong result", "cpu", "journal full")),
    Fault("trial", _doing("try")),
    Fault("the trial's end", _undoing("end_try"), bad="cpu"),
)
BYSTANDER_FAULT = Fault(
    "undo for the viewer",
    lambda call, world: call == ("start", "viewer.service") and world.reverting,
    bad="cpu",
    loses="viewer.service",
)


def _seen(world: World, name: str) -> int:
    """How often this was called, the present call included."""
    return sum(call[0] == name for call in world.calls)


@functools.cache
def plan_of(story: Story) -> list[StepSpec]:
    """The plan for the story's board."""
    return plan_on(story.make(), story.wanted())


@dataclass
class Run:
    """One scenario: a story with a fault, cut at some ticks, until an engine has ended the change."""

    story: Story
    fault: Fault
    cuts: Sequence[tuple[int, CutKind]]
    make_engine: Callable[..., Engine] = engine_on
    cancel_at: int = 0
    plan: Callable[[Story], list[StepSpec]] = plan_of

    def play(self) -> World:
        """The board at the end. `self.blown` says how many of the cuts happened."""
        self.world = world = self.story.make()
        self.before = (world.active, world.previous, dict(world.shown), set(world.running), set(world.runtimes))
        self.blown = 0
        self.power = False
        self.images_before = set(world.images)
        wanted = self.story.wanted()
        world.offered = wanted.manifest
        world.host_comes_back = not self.fault.silent_host
        steps = self.plan(self.story)
        to = self.story.boots.id if self.story.boots else None
        change = NewChange(wanted.kind.value, "test", world.active, to, steps)
        if self.story.boots and self.fault.bad:
            world.bad = {self.story.boots.id: self.fault.bad}
        world.fail_when = self._meddle
        queries = iter(range(1, 1000))
        cancelled = (lambda: next(queries) >= self.cancel_at) if self.cancel_at else (lambda: False)
        self._attempt(lambda engine: engine.run(change, lambda _: None, cancelled), 0)
        for n in range(1, len(self.cuts) + 1):
            self._attempt(lambda engine: engine.recover(lambda _: None), n)
        if world.records and world.records[max(world.records)].outcome is Outcome.RUNNING:
            # Only a journal that took no writes leads here: the next start, with room on the disk.
            world.fail_when = lambda call, w: None
            self._attempt(lambda engine: engine.recover(lambda _: None), len(self.cuts) + 1)
        if self.power:
            world.boot_half()
        return world

    def _meddle(self, call: Call, world: World) -> OperationError | None:
        if self.fault.refreshed_in and call == ("journal", self.fault.refreshed_in, "doing"):
            world.shown = dict.fromkeys(Kind, world.active)
        return _refusal(call) if self.fault.refuse(call, world) else None

    def _attempt(self, call: Callable[[Engine], object], number: int) -> None:
        at, kind = self.cuts[number] if number < len(self.cuts) else (None, CutKind.KILL)
        self.world.fuse = Fuse(at)
        engine = self.make_engine(self.world, stubborn_npu=self.fault.stubborn_npu)
        try:
            call(engine)
        except Cut:
            self.blown += 1
            self.world.fuse = Fuse()
            if kind is not CutKind.KILL:
                self.power = True
                self.world.power_cut(lose_unsynced=kind is CutKind.POWER_UNSYNCED)
        except OperationError:
            # The journal took not even the beginning of the change, or not the attempt: nothing may have moved.
            self.world.fuse = Fuse()

    def broken(self) -> list[str]:
        """What is not as it must be."""
        world = self.world
        if not world.records:
            return self._differs(self.before[0], self.before[1], None, reverted=True)
        record = world.records[max(world.records)]
        match record.outcome:
            case Outcome.RUNNING:
                return ["the change still runs"]
            case Outcome.STUCK:
                return self._stuck(record)
            case Outcome.APPLIED:
                return self._applied(record)
            case Outcome.REVERTED | Outcome.CANCELLED:
                return self._reason(record) + self._differs(self.before[0], self.before[1], record, reverted=True)

    def _reason(self, record: ChangeRecord) -> list[str]:
        if record.reason is None:
            return ["reverted without a reason"]
        lost = self.fault is NO_FAULT and self.blown and self.cuts[0][1] is not CutKind.KILL
        if lost and record.reason.code is not ErrorCode.POWER_LOST:
            return ["the record does not say that power was lost"]
        return []

    def _applied(self, record: ChangeRecord) -> list[str]:
        boots = self.story.boots.id if self.story.boots else None
        moved = boots != self.before[0]
        found = self._differs(boots, self.before[0] if moved else self.before[1], record, reverted=False)
        if moved and not record.committed:
            found.append("applied, but not committed")
        if self.fault.silent_host and any(step.kind == "await_confirmation" for step in record.steps):
            found.append("applied, though nobody confirmed the new /etc")
        if self.fault.bad and not self.power and self.fault is not NO_FAULT and self._judged():
            found.append(f"applied, though the model is bad: {self.fault.bad}")
        return found

    def _judged(self) -> bool:
        """Whether this story starts a service and looks at it."""
        return self.story.name != "deploy agent only" and self.story.shows is not None

    def _stuck(self, record: ChangeRecord) -> list[str]:
        found = [] if self.fault.stuck else [f"stuck: {record.reason and record.reason.message}"]
        if record.reason is None or record.reason.code is not ErrorCode.CHANGE_STUCK or not record.reason.remedy:
            found.append("stuck without a remedy")
        if self.world.active != self.before[0]:
            found.append("stuck, and the boot set is not the old one")
        calls = len(self.world.calls)
        self.make_engine(self.world).recover(lambda _: None)
        if len(self.world.calls) != calls:
            found.append("moves on after it was stuck")
        return found

    def _differs(
        self, active: str | None, previous: str | None, record: ChangeRecord | None, *, reverted: bool
    ) -> list[str]:
        world, found = self.world, []
        shows = self.before[2][Kind.SYSEXT] if reverted else self.story.shows and self.story.shows.id
        if self.power:
            shows = active  # a boot merges what `active` names
        if world.active != active:
            found.append(f"boots {world.active}, not {active}")
        # A `previous` that did not exist cannot be taken back, only point at the active runtime.
        if world.previous != previous and not (reverted and previous is None and world.previous == active):
            found.append(f"previous is {world.previous}, not {previous}")
        if set(world.shown.values()) != {shows}:
            found.append(f"shows {world.shown}, not {shows}")
        if world.unit_files != shows and world.unit_files is not None:
            found.append(f"systemd knows the units of {world.unit_files}, the overlay shows {shows}")
        if world.scaffold and shows == active and self.fault.name != "settle":
            found.append("the trial's scaffolding is still there")
        if world.tried is not None and self.fault.name != "the trial's end":
            found.append("a model is still on trial")
        found += self._services(shows, record if reverted else None)
        for runtime_id in (world.active, world.previous):
            manifest = world.runtimes.get(runtime_id or "")
            if runtime_id and (manifest is None or {e.image_id for e in manifest.extensions} - world.images):
                found.append(f"runtime {runtime_id} is not whole on the disk")
            if runtime_id in world.indexes and world.indexes[runtime_id] not in world.images:
                found.append(f"the module index of runtime {runtime_id} is gone")
        if reverted and record and set(world.runtimes) - self.before[4]:
            found.append("the runtime that was not activated is still staged")
        return found

    def _services(self, shows: str | None, reverted: ChangeRecord | None) -> list[str]:
        running = self.world.running
        wanted = {*self.world.owned(shows), *self.world.of_the_base}
        lost = self.fault.loses
        if lost and lost not in running and reverted:
            wanted.discard(lost)
            if not any(f"while going back: cannot start {lost}" in step.warning for step in reverted.steps):
                return [f"{lost} is down, and the record does not say so"]
        if set(running) != wanted:
            return [f"runs {sorted(running)}, not {sorted(wanted)}"]
        shown = self._images(shows)
        return [
            f"{unit} runs from another set than the one that is merged"
            for unit, (runtime_id, _) in running.items()
            if self._images(runtime_id) != shown
        ]

    def _images(self, runtime_id: str | None) -> set[str]:
        manifest = self.world.runtimes.get(runtime_id or "")
        return {e.image_id for e in manifest.extensions if e.name != "avocado-agent"} if manifest else set()


def _refusal(call: Call) -> OperationError:
    return OperationError(ErrorCode.INTERNAL, f"cannot {' '.join(str(part) for part in call)}: refused by the test")

"""A board in memory: one fake per port, each a small program over one `World`.

The world keeps apart what a power cut keeps (images, runtimes, links, journal) and what it takes (the overlay, running
services, loaded unit files). Every effect ticks the fuse before it, after it and between its parts; when the fuse
blows, nothing after that line runs. Every call is recorded, and one hook, `fail_when`, may refuse any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.change.confirmation import Confirmation
from agent.change.engine import Engine
from agent.change.record import ChangeRecord, parse_record
from agent.change.steps import build_handlers
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Extension, Manifest, image_id
from agent.extensions import Kind, MergedSet, owned_services
from agent.health import HealthPolicy, InferenceState, SelfTest, UnitState
from agent.order import Relations
from agent.plan import Bystanders, Observed, Wanted, plan_change
from agent.ports.protocols import Fetched, Holder, Process, Progress
from tests.change.sets import OS_RELEASE

Call = tuple[Any, ...]
FOLDER = Path("/state/runtimes")
QUICK = HealthPolicy(appear_s=2, first_invoke_s=4, npu_s=2, hopeless_s=0.4, stable_s=0.6, deadline_s=4, frames=3)


class Cut(BaseException):
    """The power goes, or the agent is killed."""


class Fuse:
    """Blows at the nth tick."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.count = 0

    def tick(self) -> None:
        self.count += 1
        if self.count == self.at:
            raise Cut


@dataclass
class World:
    """The whole board. `bad` says what is wrong with the model of a runtime, by runtime id."""

    # what a disk keeps
    images: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)
    moved_bytes: int = 0
    runtimes: dict[str, Manifest] = field(default_factory=dict)
    indexes: dict[str, str] = field(default_factory=dict)  # runtime -> the image with its module index
    active: str | None = None
    previous: str | None = None
    synced: tuple[str | None, str | None] = (None, None)
    records: dict[int, ChangeRecord] = field(default_factory=dict)
    # what a boot keeps
    boot: int = 1
    now_s: float = 1000.0
    shown: dict[Kind, str | None] = field(default_factory=lambda: dict.fromkeys(Kind))
    scaffold: bool = False
    unit_files: str | None = None
    running: dict[str, tuple[str | None, float]] = field(default_factory=dict)
    # what is inside things
    releases: dict[str, dict[Kind, dict[str, str]]] = field(default_factory=dict)
    offered: Manifest | None = None
    bad: dict[str, str] = field(default_factory=dict)
    host_comes_back: bool = True
    of_the_base: frozenset[str] = frozenset()  # services that no image owns, and that run from files of one
    after: dict[str, frozenset[str]] = field(default_factory=dict)
    masked: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)  # owned, and their unit file is in an image that was left out
    brief: set[str] = field(default_factory=set)  # services that end by themselves as soon as they were started
    # the test's hands
    fuse: Fuse = field(default_factory=Fuse)
    calls: list[Call] = field(default_factory=list)
    fail_when: Callable[[Call, World], OperationError | None] = lambda call, world: None

    reverting: bool = False

    def begin(self, *call: Any) -> None:
        """An effect is about to happen."""
        self.fuse.tick()
        self.look(*call)

    def look(self, *call: Any) -> None:
        """A call that changes nothing: recorded, and it may be refused."""
        self.calls.append(call)
        error = self.fail_when(call, self)
        if error is not None:
            raise error

    def power_cut(self, *, lose_unsynced: bool) -> None:
        """Only the disk survives; the next boot merges what `active` names and reads its unit files."""
        if lose_unsynced:
            self.active, self.previous = self.synced
        self.synced = (self.active, self.previous)
        self.boot += 1
        self.shown = dict.fromkeys(Kind, self.active)
        self.scaffold = False
        self.unit_files = self.active
        self.running = dict.fromkeys(self.of_the_base, (self.active, self.now_s))

    def boot_half(self) -> None:
        """What the agent does at its first start of a boot, once recovery is through: the owned services run."""
        for unit in self.owned(self.active):
            if unit not in self.running:
                self.running[unit] = (self.active, self.now_s)

    def owned(self, runtime_id: str | None) -> list[str]:
        """The units that a runtime's images own, but for the agent's."""
        manifest = self.runtimes.get(runtime_id or "")
        keys = [self.releases[e.image_id][Kind(k)] for e in (manifest.extensions if manifest else ()) for k in e.types]
        return [
            unit for unit in dict.fromkeys(u for k in keys for u in owned_services(k)) if unit != "avocadod.service"
        ]

    def exists(self, unit: str) -> bool:
        """systemd has read a file for it."""
        return unit not in self.missing and (unit in self.of_the_base or unit in self.owned(self.unit_files))


@dataclass
class FakeUnits:
    world: World

    def states(self, names: Sequence[str]) -> dict[str, UnitState]:
        return {name: self._state(name) for name in names}

    def _state(self, name: str) -> UnitState:
        world = self.world
        if name in world.running:
            runtime_id, since = world.running[name]
            crashes = int((world.now_s - since) / 0.3) if world.bad.get(runtime_id or "") == "crash-loop" else 0
            load = "masked" if name in world.masked else "loaded"
            return UnitState(name, load, "active", "running", "success", 100, crashes)
        load = "masked" if name in world.masked else "loaded" if world.exists(name) else "not-found"
        return UnitState(name, load, "inactive", "dead", "success", 0, 0)

    def relations(self, names: Sequence[str]) -> dict[str, Relations]:
        return {name: Relations(self.world.after.get(name, frozenset())) for name in names if self.world.exists(name)}

    def start(self, name: str, timeout_s: float) -> None:
        world = self.world
        world.begin("start", name)
        if not world.exists(name) or name in world.masked:
            raise OperationError(ErrorCode.UNIT_FAILED, f"cannot start {name}: unit not found")
        if name not in world.brief:
            world.running.setdefault(name, (world.shown[Kind.SYSEXT], world.now_s))
        world.fuse.tick()

    def stop(self, name: str, timeout_s: float) -> None:
        self.world.begin("stop", name)
        self.world.running.pop(name, None)
        self.world.fuse.tick()

    def reload_manager(self, timeout_s: float) -> None:
        self.world.begin("reload_manager")
        self.world.unit_files = self.world.shown[Kind.SYSEXT]
        self.world.fuse.tick()

    def run(self, argv: Sequence[str], timeout_s: float) -> None:
        self.world.begin("run", *argv)
        self.world.fuse.tick()


@dataclass
class FakeOverlay:
    world: World

    def merged(self) -> MergedSet:
        images = {kind: self._images(kind) for kind in Kind}
        return MergedSet({kind: tuple(sorted(links)) for kind, links in images.items() if links}, images=images)

    def _images(self, kind: Kind) -> dict[str, str]:
        manifest = self.world.runtimes.get(self.world.shown[kind] or "")
        extensions = manifest.extensions if manifest else ()
        return {manifest.link_name(e).removesuffix(".raw"): e.image_id for e in extensions if kind in e.types}

    def check(self, runtime: Path, timeout_s: float) -> None:
        self.world.look("check", runtime.name)

    def show(self, runtime: Path | None, timeout_s: float) -> None:
        wanted = runtime.name if runtime else None
        self.world.begin("show", wanted)
        self.world.scaffold = wanted != self.world.active
        for kind in Kind:
            self.world.fuse.tick()
            self.world.shown[kind] = wanted
        self.world.fuse.tick()

    def settle(self, timeout_s: float) -> None:
        self.world.begin("settle")
        self.world.scaffold = False
        self.world.fuse.tick()


@dataclass
class FakeNpu:
    """`stubborn`: a process of ours keeps the node after its unit was stopped."""

    world: World
    stubborn: bool = False

    def holders(self, nodes: Sequence[str], units: Sequence[str]) -> list[Holder]:
        self.world.look("holders")
        if self.stubborn:
            return [Holder(Process(812, "python3", "D", "simnpu_wait", "pose.service"), nodes[0], ours=True)]
        return []


@dataclass
class FakeInference:
    world: World

    def describe(self, timeout_s: float) -> InferenceState | None:
        running = self.world.running.get("pose.service")
        if running is None:
            return None
        runtime_id, since = running
        age_s = self.world.now_s - since
        on_cpu = self.world.bad.get(runtime_id or "") == "cpu"
        return InferenceState(
            state="serving",
            backend="cpu" if on_cpu else "npu",
            reason="no-npu" if on_cpu else "ok",
            required_backend="npu",
            model=f"movenet {runtime_id}",
            frames=int(age_s / 0.1),
            camera=True,
            first_invoke_done=age_s > 0.3 and self.world.bad.get(runtime_id or "") != "hang",
            nodes=("/dev/simnpu0",),
            settle_s=0.2,
            contexts=1,
        )

    def self_test(self, timeout_s: float) -> SelfTest:
        self.world.look("self_test")
        runtime_id = self.world.running["pose.service"][0]
        wrong = self.world.bad.get(runtime_id or "") == "wrong-result"
        return SelfTest(not wrong, "npu", 0.31 if wrong else 0.99, "wrong-result" if wrong else "ok")


@dataclass
class FakeStore:
    world: World

    def image(self, image_id: str) -> Path | None:
        return Path("/state/images", f"{image_id}.raw") if image_id in self.world.images else None

    def part(self, image_id: str) -> Path:
        return Path("/state/images", f"{image_id}.part")

    def finish_image(self, extension: Extension) -> Path:
        self.world.images.add(extension.image_id)
        return Path("/state/images", f"{extension.image_id}.raw")

    def write_image(self, extension: Extension, data: bytes) -> Path:
        raise NotImplementedError

    def verify_image(self, extension: Extension) -> bool:
        return extension.image_id in self.world.images

    def image_ids(self) -> list[str]:
        return sorted(self.world.images)

    def remove_image(self, image_id: str) -> None:
        self.world.begin("remove_image", image_id)
        self.world.images.discard(image_id)
        self.world.fuse.tick()

    def begun(self) -> dict[str, int]:
        return dict.fromkeys(sorted(self.world.begun), 1000)

    def remove_part(self, image_id: str) -> None:
        self.world.begin("remove_part", image_id)
        self.world.begun.discard(image_id)
        self.world.fuse.tick()

    def free_bytes(self) -> int:
        return 1 << 40


@dataclass
class FakeRuntimes:
    world: World

    def module_index(self, runtime_id: str) -> str | None:
        return self.world.indexes.get(runtime_id)

    def stage(self, manifest: Manifest, module_index: str | None = None) -> Path:
        self.world.begin("stage", manifest.id)
        self.world.runtimes[manifest.id] = manifest
        if module_index is not None:
            self.world.indexes[manifest.id] = module_index
        self.world.fuse.tick()
        return FOLDER / manifest.id

    def remove(self, runtime_id: str) -> None:
        self.world.begin("remove", runtime_id)
        self.world.runtimes.pop(runtime_id, None)
        self.world.indexes.pop(runtime_id, None)
        self.world.fuse.tick()

    def ids(self) -> list[str]:
        return sorted(self.world.runtimes)

    def manifest(self, runtime_id: str) -> Manifest:
        return self.world.runtimes[runtime_id]

    def active(self) -> str | None:
        return self.world.active

    def previous(self) -> str | None:
        return self.world.previous

    def folder(self, runtime_id: str) -> Path:
        return FOLDER / runtime_id

    def activate(self, runtime_id: str, previous: str | None) -> None:
        world = self.world
        world.begin("activate", runtime_id)
        if previous is not None:
            world.previous = previous
        world.fuse.tick()
        world.synced = (world.active, world.previous)
        world.active = runtime_id
        world.fuse.tick()
        world.begin("sync_links")
        world.synced = (world.active, world.previous)
        world.fuse.tick()


@dataclass
class FakeImages:
    world: World

    def release(self, image: Path, name: str, kind: Kind) -> dict[str, str]:
        self.world.look("release", name)
        return self.world.releases[image.stem][kind]


@dataclass
class FakeIndexer:
    """The NPU's extension brings a module."""

    world: World

    def index(self, extensions: Sequence[Extension]) -> str | None:
        self.world.begin("index")
        made = next((image_id(e.image_id) for e in extensions if e.name == "npu-virtual"), None)
        self.world.images |= {made} if made else set()
        self.world.fuse.tick()
        return made


@dataclass
class FakeSource:
    world: World

    def manifest(self) -> Manifest:
        assert self.world.offered
        return self.world.offered

    def transfer_sizes(self, extension: Extension, held: Sequence[Extension]) -> tuple[int, str | None]:
        base = next((h.image_id for h in held if h.name == extension.name), None)
        return (100 if base else extension.size_bytes), base

    def fetch(self, extension: Extension, held: Sequence[Extension], progress: Progress) -> Fetched:
        self.world.begin("fetch", extension.name)
        size, base = self.transfer_sizes(extension, held)
        progress(size // 2, size)
        self.world.fuse.tick()
        self.world.images.add(extension.image_id)
        self.world.fuse.tick()
        self.world.moved_bytes += size
        return Fetched(extension.image_id, "delta" if base else "full", base, size)

    def moved_bytes(self) -> int:
        return self.world.moved_bytes

    def close(self) -> None:
        pass


@dataclass
class FakeClock:
    world: World

    def monotonic(self) -> float:
        return self.world.now_s

    def now(self) -> str:
        return "2026-11-30T22:00:00Z"

    def sleep(self, seconds: float) -> None:
        self.world.now_s += seconds

    def boot_id(self) -> str:
        return f"boot-{self.world.boot}"


class FakeHost(Confirmation):
    """A host that comes back, or does not."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def given(self) -> bool:
        return self._world.host_comes_back


@dataclass
class FakeJournal:
    """Records are read back through their bytes, as from a disk."""

    world: World

    def next_number(self) -> int:
        return max(self.world.records, default=0) + 1

    def save(self, record: ChangeRecord) -> None:
        self.world.begin("journal", record.step and record.step.kind, record.step and record.step.phase.value)
        self.world.records[record.number] = record
        self.world.reverting = record.reverting
        self.world.fuse.tick()

    def prune(self) -> None:
        pass

    def newest(self) -> ChangeRecord | None:
        return parse_record(self.world.records[max(self.world.records)].as_bytes()) if self.world.records else None


def engine_on(
    world: World, *, stubborn_npu: bool = False, journal: FakeJournal | None = None, **settings: Any
) -> Engine:
    """The engine with every real step over the fakes."""
    handlers = build_handlers(
        units=FakeUnits(world),
        overlay=FakeOverlay(world),
        npu=FakeNpu(world, stubborn_npu),
        inference=FakeInference(world),
        store=FakeStore(world),
        runtimes=FakeRuntimes(world),
        images=FakeImages(world),
        indexer=FakeIndexer(world),
        source_for=lambda _: FakeSource(world),
        clock=FakeClock(world),
        confirmation=FakeHost(world),
        reach=lambda server: world.host_comes_back,
        policy=QUICK,
    )
    return Engine(journal or FakeJournal(world), handlers, FakeClock(world), **settings)


def observe(world: World) -> Observed:
    """What the daemon would gather before a plan."""
    held = {image: keys for image, keys in world.releases.items() if image in world.images}
    return Observed(
        target="virtual",
        arch="x86_64",
        python="3.13",
        agent_version="1.0.0",
        os_release=OS_RELEASE,
        active=world.active,
        previous=world.previous,
        runtimes=dict(world.runtimes),
        images=dict.fromkeys(world.images, 1000),
        releases=held,
        merged=FakeOverlay(world).merged(),
        free_bytes=1 << 40,
        inference=FakeInference(world).describe(1.0),
        bystanders=Bystanders(tuple(sorted(world.of_the_base))),
    )


def plan_on(world: World, wanted: Wanted) -> list[Any]:
    """The plan for this board now."""
    return plan_change(observe(world), wanted)

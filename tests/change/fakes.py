"""What runs on a board, over one `World`: units, the overlay, the NPU, the pose service, time, and a host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.change.confirmation import Confirmation
from agent.change.step import Shutdown
from agent.contract.errors import ErrorCode, OperationError
from agent.extensions import Kind, MergedSet
from agent.health import InferenceState, SelfTest, UnitState
from agent.order import Relations
from agent.ports.protocols import Holder, Process, Tried, Verdict
from agent.tried import unknown
from tests.change.world import World


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

    def require_reload(self) -> None:
        self.world.look("require_reload")

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
            contexts=self.world.npu_contexts,
        )

    def self_test(self, timeout_s: float) -> SelfTest:
        self.world.look("self_test")
        runtime_id = self.world.running["pose.service"][0]
        wrong = self.world.bad.get(runtime_id or "") == "wrong-result"
        return SelfTest(not wrong, "npu", 0.31 if wrong else 0.99, "wrong-result" if wrong else "ok")


@dataclass
class FakeRehearsal:
    """Finds a wrong result; what else is bad shows only in service."""

    world: World

    def begin(self, runtime: Path, timeout_s: float, *, only_cpu: bool) -> None:
        self.world.begin("try", runtime.name, "cpu" if only_cpu else "npu")
        self.world.tried = (runtime.name, self.world.now_s, only_cpu)
        self.world.fuse.tick()

    def result(self) -> Tried | None:
        self.world.fuse.tick()
        if self.world.tried is None:
            return unknown("nothing is on trial")
        runtime_id, since, only_cpu = self.world.tried
        if self.world.now_s - since < self.world.trial_takes_s:
            return None
        self.world.tried = None
        backend = "cpu" if only_cpu else "npu"
        if self.world.npu_is_busy and not only_cpu:
            return Tried(Verdict.UNKNOWN, backend, why="it grants 2 contexts", is_busy=True)
        if self.world.bad.get(runtime_id) == "wrong-result":
            return Tried(Verdict.FAILED, backend, "movenet 2", 0.31, why="its golden frame has OKS 0.31")
        return Tried(Verdict.PASSED, backend, "movenet 2", 0.99, 12.0)

    def end(self) -> None:
        self.world.begin("end_try")
        self.world.tried = None
        self.world.fuse.tick()


@dataclass
class FakeClock:
    world: World

    def monotonic(self) -> float:
        return self.world.now_s

    def now(self) -> str:
        return "2026-11-30T22:00:00Z"

    def sleep(self, seconds: float) -> None:
        if self.world.stopping:
            raise Shutdown
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

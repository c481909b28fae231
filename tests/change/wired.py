"""The engine with every real step over the fakes, and a plan for the board that they are."""

from __future__ import annotations

from typing import Any

from agent.change.engine import Engine
from agent.change.record import ChangeRecord, NewChange
from agent.change.steps import build_handlers
from agent.contract.linked import linked_runtime
from agent.contract.manifest import Manifest
from agent.health import HealthPolicy
from agent.plan import Bystanders, Observed, Wanted, plan_change
from tests.change.fake_disk import FakeImages, FakeIndexer, FakeJournal, FakeRuntimes, FakeSource, FakeStore
from tests.change.fakes import FakeClock, FakeHost, FakeInference, FakeNpu, FakeOverlay, FakeRehearsal, FakeUnits
from tests.change.sets import OS_RELEASE
from tests.change.world import World

QUICK = HealthPolicy(appear_s=2, first_invoke_s=4, npu_s=2, hopeless_s=0.4, stable_s=0.6, deadline_s=4, frames=3)


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
        rehearsal=FakeRehearsal(world),
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
        runtimes={runtime: _read(world, runtime) for runtime in world.runtimes},
        images=dict.fromkeys(world.images, 1000),
        releases=held,
        merged=FakeOverlay(world).merged(),
        free_bytes=1 << 40,
        inference=FakeInference(world).describe(1.0),
        bystanders=Bystanders(tuple(sorted(world.of_the_base))),
    )


def _read(world: World, runtime_id: str) -> Manifest:
    manifest = world.runtimes[runtime_id]
    if runtime_id not in world.unreadable:
        return manifest
    return linked_runtime(runtime_id, FakeRuntimes(world).links(runtime_id)).on_board(manifest.target, manifest.arch)


def plan_on(world: World, wanted: Wanted) -> list[Any]:
    """The plan for this board now."""
    return plan_change(observe(world), wanted)


def change_on(world: World, wanted: Wanted) -> NewChange:
    """What is wanted, planned for this board now and not begun."""
    world.offered = wanted.manifest
    to = wanted.manifest.id if wanted.manifest else world.active
    return NewChange(wanted.kind.value, "root", world.active, to, plan_on(world, wanted))


def run(world: World, wanted: Wanted, **settings: object) -> ChangeRecord:
    """What is wanted, from its plan to its end."""
    return engine_on(world, **settings).run(change_on(world, wanted), lambda _: None, lambda: False)

"""The same steps over the real store, runtimes and journal in a folder; the agent dies at writes and effects."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent.change.engine import Engine
from agent.change.journal import Journal
from agent.change.record import ChangeRecord, NewChange, Outcome
from agent.change.steps import build_handlers
from agent.contract.manifest import MODULE_INDEX, Extension, Manifest, image_id, sha256_hex
from agent.plan import ChangeKind, Wanted, plan_change
from agent.ports.files import FileStore, write_durably
from agent.ports.protocols import Fetched, Progress
from agent.ports.runtimes import FileRuntimes
from tests.change.fake_disk import FakeImages, FakeSource
from tests.change.fakes import FakeClock, FakeHost, FakeInference, FakeNpu, FakeOverlay, FakeRehearsal, FakeUnits
from tests.change.stories import R0, R1, R2, board
from tests.change.wired import QUICK, observe
from tests.change.world import Cut, Fuse


@dataclass
class WritingSource(FakeSource):
    """Hands out the bytes that the image ids of `sets.py` are the names of."""

    store: FileStore

    def fetch(self, extension: Extension, held: Sequence[Extension], progress: Progress) -> Fetched:
        part = self.store.part(extension.image_id)
        part.write_bytes(f"{extension.name} {extension.version}".encode())
        self.store.finish_image(extension)
        return Fetched(extension.image_id, "full", None, extension.size_bytes)


def index_over(extensions: Sequence[Extension]) -> tuple[Extension, bytes]:
    """The image that stands for their module index."""
    data = b"index of " + b" ".join(extension.image_id.encode() for extension in extensions)
    sha256 = sha256_hex(data)
    fields: dict[str, Any] = {"name": MODULE_INDEX, "version": "1", "types": ["sysext"], "size_bytes": len(data)}
    return Extension(image_id=image_id(sha256), sha256=sha256, **fields), data


@dataclass
class WritingIndexer:
    """Makes that image."""

    store: FileStore

    def index(self, extensions: Sequence[Extension]) -> str | None:
        made, data = index_over(extensions)
        if not self.store.verify_image(made):
            self.store.write_image(made, data)
        return made.image_id


class Disk:
    """A board whose disk is a folder; the rest is the world of the fakes. `fresh`: nothing is on the disk yet."""

    def __init__(self, state: Path, *, fresh: bool = True) -> None:
        self.state = state
        self.world = board(R1, previous=R0)
        self.world.runtimes[R2.id] = R2  # what the overlay and the units would read out of the images
        self.store, self.runtimes = FileStore(state), FileRuntimes(state)
        self.journal = Journal(state / "changes", self._write)
        source = WritingSource(self.world, self.store)
        for manifest in (R0, R1) if fresh else ():
            for extension in manifest.extensions:
                source.fetch(extension, (), lambda done, total: None)
            self.runtimes.stage(manifest, WritingIndexer(self.store).index(manifest.extensions))
            self.runtimes.activate(manifest.id, self.runtimes.active())

    def _write(self, path: Path, data: bytes) -> None:
        self.world.fuse.tick()
        write_durably(path, data)
        self.world.fuse.tick()

    def engine(self) -> Engine:
        world = self.world
        handlers = build_handlers(
            units=FakeUnits(world),
            overlay=FakeOverlay(world),
            npu=FakeNpu(world),
            inference=FakeInference(world),
            store=self.store,
            runtimes=self.runtimes,
            images=FakeImages(world),
            indexer=WritingIndexer(self.store),
            rehearsal=FakeRehearsal(world),
            source_for=lambda _: WritingSource(world, self.store),
            clock=FakeClock(world),
            confirmation=FakeHost(world),
            reach=lambda server: world.host_comes_back,
            policy=QUICK,
        )
        return Engine(self.journal, handlers, FakeClock(world))

    def change(self) -> NewChange:
        wanted = Wanted(ChangeKind.DEPLOY, R2, source="unix:/x")
        del self.world.runtimes[R2.id]
        steps = plan_change(observe(self.world), wanted)
        self.world.runtimes[R2.id] = R2
        return NewChange("deploy", "root", R1.id, R2.id, steps)

    def links(self) -> tuple[str | None, str | None, list[str]]:
        return self.runtimes.active(), self.runtimes.previous(), self.runtimes.ids()


def images(*manifests: Manifest) -> list[str]:
    return sorted(
        {extension.image_id for manifest in manifests for extension in manifest.extensions}
        | {index_over(manifest.extensions)[0].image_id for manifest in manifests}
    )


def run(disk: Disk) -> ChangeRecord:
    return disk.engine().run(disk.change(), lambda _: None, lambda: False)


def test_a_deploy_leaves_two_runtimes_and_their_images_on_the_disk(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    record = run(disk)
    assert record.outcome is Outcome.APPLIED
    assert disk.links() == (R2.id, R1.id, sorted([R1.id, R2.id]))
    assert disk.store.image_ids() == images(R1, R2)
    assert sorted(path.name for path in (tmp_path / "active" / "sysext").iterdir()) == [
        "95-avocado-agent.raw",
        "96-npu-virtual.raw",
        "97-pose-app.raw",
        "98-pose-model.raw",
        "99-zz-module-index.raw",
    ]
    assert json.loads((tmp_path / "changes" / "1.json").read_text())["outcome"] == "applied"


def test_a_deploy_of_a_bad_model_leaves_the_disk_as_it_was_but_for_its_images(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.world.bad = {R2.id: "cpu"}
    assert run(disk).outcome is Outcome.REVERTED
    assert disk.links() == (R1.id, R0.id, sorted([R0.id, R1.id]))
    assert disk.store.image_ids() == images(R0, R1, R2)
    assert disk.world.running["pose.service"][0] == R1.id


@pytest.mark.parametrize("bad", ["", "cpu"])
def test_an_agent_that_dies_at_any_write_or_effect_ends_old_or_new(tmp_path: Path, bad: str) -> None:
    for at in itertools.count(1, 5):
        disk = Disk(tmp_path / str(at))
        disk.world.bad = {R2.id: bad} if bad else {}
        change = disk.change()
        disk.world.fuse = Fuse(at)
        try:
            disk.engine().run(change, lambda _: None, lambda: False)
        except Cut:
            disk.world.fuse = Fuse()
            disk.engine().recover(lambda _: None)
        else:
            break
        newest = disk.journal.newest()
        applied = newest is not None and newest.outcome is Outcome.APPLIED
        assert newest is None or newest.outcome in (Outcome.APPLIED, Outcome.REVERTED)
        assert not (applied and bad)
        expected = (R2.id, R1.id, sorted([R1.id, R2.id])) if applied else (R1.id, R0.id, sorted([R0.id, R1.id]))
        assert disk.links() == expected, f"killed at {at}"
        assert disk.world.running["pose.service"][0] == expected[0], f"killed at {at}"
    assert at > 50

"""What a board's disk keeps, over one `World`: images and what fetches and indexes them, runtimes, the journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.change.record import ChangeRecord, parse_record
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.linked import Links
from agent.contract.manifest import Extension, Manifest, image_id
from agent.extensions import Kind
from agent.ports.protocols import Fetched, Progress
from tests.change.world import World

FOLDER = Path("/state/runtimes")


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
        return self.verify_made(extension.image_id)

    def verify_made(self, image_id: str) -> bool:
        return image_id in self.world.images - self.world.damaged

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
        self.world.unreadable.discard(manifest.id)
        if module_index is not None:
            self.world.indexes[manifest.id] = module_index
        else:
            self.world.indexes.pop(manifest.id, None)
        self.world.fuse.tick()
        return FOLDER / manifest.id

    def remove(self, runtime_id: str) -> None:
        self.world.begin("remove", runtime_id)
        self.world.runtimes.pop(runtime_id, None)
        self.world.indexes.pop(runtime_id, None)
        self.world.fuse.tick()

    def point_index(self, runtime_id: str, image_id: str | None) -> Path:
        self.world.begin("point_index", runtime_id)
        if image_id is None:
            self.world.indexes.pop(runtime_id, None)
        else:
            self.world.indexes[runtime_id] = image_id
        self.world.fuse.tick()
        return FOLDER / runtime_id

    def ids(self) -> list[str]:
        return sorted(self.world.runtimes)

    def links(self, runtime_id: str) -> Links:
        manifest = self.world.runtimes[runtime_id]
        return {
            kind: {
                manifest.link_name(e).removesuffix(".raw"): e.image_id for e in manifest.extensions if kind in e.types
            }
            for kind in Kind
        }

    def manifest(self, runtime_id: str) -> Manifest:
        if runtime_id in self.world.unreadable:
            raise OperationError(ErrorCode.BAD_MANIFEST, f"cannot read the manifest of runtime {runtime_id}: garbage")
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
        self.world.damaged.discard(made or "")
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

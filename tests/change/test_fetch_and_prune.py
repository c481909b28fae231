"""What fetch_images says of each image, and what prune takes away besides whole images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent.change.steps.fetch_images import FetchImages
from agent.change.steps.prune import Prune
from agent.ports.files import FileStore
from tests.change.fake_disk import FakeRuntimes, FakeSource, FakeStore
from tests.change.stories import R1, R2
from tests.change.world import World


class Heard:
    """What a step reported."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.shown: list[tuple[int, int]] = []

    def fact(self, name: str, value: Any) -> None:
        self.facts[name] = value

    def progress(self, done: int, total: int) -> None:
        self.shown.append((done, total))

    def warn(self, message: str) -> None:
        self.facts["warning"] = message


def fetch(world: World) -> dict[str, Any]:
    heard = Heard()
    inputs = {
        "source": "unix:/run/x",
        "extensions": [extension.model_dump(mode="json") for extension in R2.extensions],
        "held": [extension.model_dump(mode="json") for extension in R1.extensions],
    }
    FetchImages(FakeStore(world), lambda _: FakeSource(world)).do(inputs, {}, heard)  # type: ignore[arg-type]
    return heard.facts


def test_a_damaged_base_is_named_where_the_full_transfer_came() -> None:
    world = World(images={extension.image_id for extension in R1.extensions})
    model = next(extension for extension in R1.extensions if extension.name == "pose-model")
    world.images.discard(model.image_id)  # its bytes no longer hash to its name
    facts = fetch(world)
    notes = {image["name"]: (image["way"], image["note"]) for image in facts["images"] if image["way"] != "held"}
    assert notes == {
        "pose-config": ("delta", ""),
        "pose-model": ("full", f"image {model.image_id} of pose-model {model.version} is damaged"),
    }
    assert facts["moved_bytes"] == world.moved_bytes > 0


def test_when_nothing_is_missing_nothing_was_moved() -> None:
    facts = fetch(World(images={extension.image_id for extension in R2.extensions}))
    assert (facts["moved_bytes"], facts["image_bytes"]) == (0, 0)


def test_what_was_begun_of_an_image_goes_unless_a_runtime_still_wants_it() -> None:
    wanted = R2.extensions[0].image_id
    whole = R1.extensions[0].image_id
    world = World(images={whole}, begun={wanted, whole, "nobody"}, runtimes={R1.id: R1, R2.id: R2}, active=R1.id)
    prune = Prune(FakeRuntimes(world), FakeStore(world))
    prune.do({"keep": [R1.id, R2.id]}, {}, Heard())  # type: ignore[arg-type]
    assert world.begun == {wanted}


def test_the_store_finds_and_removes_every_piece_of_a_begun_image(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    begun, whole = R1.extensions[0].image_id, R2.extensions[0].image_id
    assert store.begun() == {}
    for suffix in ("part", "progress", "progress-new"):
        store.part(begun).with_suffix(f".{suffix}").write_bytes(bytes(1 << 16))
    for name in (f"{whole}.raw", "notes.part", "README"):
        (tmp_path / "images" / name).write_bytes(b"x")
    assert list(store.begun()) == [begun]
    assert 3 << 16 <= store.begun()[begun] < 4 << 16
    store.remove_part(begun)
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == sorted(
        [f"{whole}.raw", "notes.part", "README"]
    )

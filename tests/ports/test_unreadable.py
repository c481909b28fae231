"""A disk that does not give back what was written: every reader names it, and none ends the agent."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.change.journal import Journal
from agent.change.steps.prune import Prune
from agent.contract.errors import ErrorCode, OperationError
from agent.ports.files import FileStore, write_durably
from agent.ports.runtimes import FileRuntimes
from agent.trust_state import problems
from tests.change.sets import with_keys
from tests.change.stories import R1
from tests.hostile.board import extension

ONE, TWO = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"
MODEL = extension(b"model")


def manifest(runtime_id: str, *extensions: Any) -> Any:
    return with_keys(R1, id=runtime_id, extensions=[one.model_dump() for one in extensions])


def put(store: FileStore, image: Any, data: bytes) -> None:
    store.part(image.image_id).write_bytes(data)
    store.finish_image(image)


class Unreadable:
    """A disk of which one file or folder cannot be read any more: what the kernel says of a block that is lost."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
        def refuse(real: Callable[..., Any]) -> Callable[..., Any]:
            def tried(self: Path, *words: Any, **more: Any) -> Any:
                if self == path:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
                return real(self, *words, **more)

            return tried

        for name in ("open", "read_bytes", "iterdir"):
            monkeypatch.setattr(Path, name, refuse(getattr(Path, name)))


def test_a_folder_of_images_or_runtimes_that_cannot_be_read_is_empty_and_keeps_the_active_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, runtimes = FileStore(tmp_path), FileRuntimes(tmp_path)
    put(store, MODEL, b"model")
    runtimes.stage(manifest(ONE, MODEL))
    runtimes.stage(manifest(TWO, MODEL))
    runtimes.activate(ONE, None)
    Unreadable(monkeypatch, tmp_path / "images")
    Unreadable(monkeypatch, tmp_path / "runtimes")
    assert (store.image_ids(), store.begun(), runtimes.ids()) == ([], {}, [ONE])


def test_a_manifest_that_the_disk_does_not_give_back_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtimes = FileRuntimes(tmp_path)
    folder = runtimes.stage(manifest(ONE, MODEL))
    Unreadable(monkeypatch, folder / "manifest.json")
    with pytest.raises(OperationError) as caught:
        runtimes.manifest(ONE)
    assert (caught.value.code, caught.value.message, caught.value.remedy) == (
        ErrorCode.BAD_MANIFEST,
        f"cannot read the manifest of runtime {ONE}: Input/output error",
        f"Run: avocadoctl runtime remove {ONE}",
    )


def test_a_trust_state_that_the_disk_does_not_give_back_is_a_problem_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").mkdir()
    for name in ("root.json", "cache/timestamp.json"):
        (tmp_path / name).write_text("{}")
        Unreadable(monkeypatch, tmp_path / name)
    said = [error.message for error in problems(tmp_path)]
    assert f"cannot use {tmp_path}/cache/timestamp.json: it does not read" in said
    assert said[0].endswith("root.json does not read (Input/output error)")


def test_records_that_cannot_be_listed_are_no_empty_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "changes", write_durably)
    assert journal.next_number() == 1
    (tmp_path / "changes").mkdir()
    Unreadable(monkeypatch, tmp_path / "changes")
    with pytest.raises(OperationError) as caught:
        journal.next_number()
    assert (caught.value.code, caught.value.message) == (
        ErrorCode.DISK_FAILED,
        f"cannot read {tmp_path}/changes: Input/output error",
    )
    journal.prune()


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_prune_removes_no_image_where_half_of_the_active_runtimes_links_is_all_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_lost: bool
) -> None:
    store, runtimes = FileStore(tmp_path), FileRuntimes(tmp_path)
    config = extension(b"config").model_copy(update={"name": "pose-config", "types": ["confext"]})
    put(store, MODEL, b"model")
    put(store, config, b"config")
    folder = runtimes.stage(manifest(ONE, MODEL, config))
    runtimes.activate(ONE, None)
    (folder / "manifest.json").write_text("garbage")
    if is_lost:
        shutil.rmtree(folder / "confext")
    else:
        Unreadable(monkeypatch, folder / "confext")
    said: list[str] = []
    report: Any = SimpleNamespace(fact=lambda name, value: None, warn=said.append)
    Prune(runtimes, store).do({"keep": []}, {}, report)
    assert store.image_ids() == sorted([MODEL.image_id, config.image_id])
    assert said == [f"no image was removed: neither the manifest nor the links of runtime {ONE} tell which it needs"]

"""Durable writes, the store and the runtimes on a real file system."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Extension, Manifest, image_id, manifest_bytes
from agent.ports import files
from agent.ports.files import FileStore, rename_link_durably, write_durably
from agent.ports.runtimes import FileRuntimes

ONE = "11111111-1111-4111-8111-111111111111"
TWO = "22222222-2222-4222-8222-222222222222"


def extension(name: str, data: bytes, *types: str) -> Extension:
    sha256 = hashlib.sha256(data).hexdigest()
    fields: dict[str, Any] = {"types": list(types) or ["sysext"], "size_bytes": len(data), "version": "1"}
    return Extension(name=name, sha256=sha256, image_id=image_id(sha256), **fields)


def manifest(runtime_id: str, *extensions: Extension, built_at: str = "2026-11-30T22:00:00Z") -> Manifest:
    return Manifest.model_validate(
        {
            "manifest_version": 1,
            "id": runtime_id,
            "built_at": built_at,
            "runtime": {"name": "npu-pose", "version": "1.0"},
            "extensions": [e.model_dump() for e in extensions],
            "target": "virtual",
            "arch": "x86_64",
        }
    )


MODEL, CONFIG = extension("pose-model", b"model"), extension("pose-config", b"config", "confext")


def put(store: FileStore, image: Extension, data: bytes) -> Path:
    store.part(image.image_id).write_bytes(data)
    return store.finish_image(image)


def test_a_durable_write_syncs_the_file_before_the_rename_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        events.append("sync " + Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real_fsync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        events.append(f"rename {self.name} {Path(target).name}")
        return real_rename(self, target)

    monkeypatch.setattr(files.os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    write_durably(tmp_path / "7.json", b"{}")
    assert events == ["sync .7.json.tmp", "rename .7.json.tmp 7.json", f"sync {tmp_path.name}"]
    events.clear()
    rename_link_durably(tmp_path / "active", f"runtimes/{ONE}")
    assert events == ["rename .active.tmp active", f"sync {tmp_path.name}"]


def test_a_durable_write_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "7.json"
    write_durably(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OperationError) as caught:
        write_durably(path, b"new")
    assert caught.value.code is ErrorCode.NO_SPACE
    assert caught.value.message == f"cannot write {path}: No space left on device"
    assert path.read_bytes() == b"old"


def test_a_folder_that_cannot_be_made_is_said_like_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: object, mode: int = 0o777) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(OperationError) as caught:
        write_durably(tmp_path / "changes/1.json", b"{}")
    assert caught.value.code is ErrorCode.NO_SPACE
    with pytest.raises(OperationError) as caught:
        FileStore(tmp_path).part(ONE)
    assert caught.value.code is ErrorCode.NO_SPACE


def test_a_durable_write_does_not_follow_a_link_left_at_its_temporary_name(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / ".7.json.tmp").symlink_to("precious")
    with pytest.raises(OperationError, match="cannot write"):
        write_durably(tmp_path / "7.json", b"{}")
    assert (tmp_path / "precious").read_text() == "precious"


def test_an_image_appears_only_when_its_bytes_hash_to_its_name(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    assert store.image(MODEL.image_id) is None
    with pytest.raises(OperationError) as caught:
        put(store, MODEL, b"other bytes")
    assert caught.value.code is ErrorCode.HASH_MISMATCH
    assert (store.image_ids(), store.part(MODEL.image_id).exists()) == ([], False)
    path = put(store, MODEL, b"model")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"model", 0o444)
    assert store.image_ids() == [MODEL.image_id]
    assert store.verify_image(MODEL)


def test_a_damaged_image_does_not_verify(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    path = put(store, MODEL, b"model")
    path.chmod(0o644)
    path.write_bytes(b"mod3l")
    assert not store.verify_image(MODEL)


def test_stray_files_links_and_folders_in_the_store_are_not_images(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    put(store, CONFIG, b"config")
    images = tmp_path / "images"
    (images / "x (1).raw").touch()
    (images / f"{ONE}.raw~").touch()
    (images / f"{ONE}.raw").symlink_to("/etc/passwd")
    (images / f"{TWO}.raw").mkdir()
    assert store.image_ids() == [CONFIG.image_id]
    assert store.image(ONE) is None
    assert store.image(TWO) is None


@pytest.mark.parametrize("name", ["../x", "", "ABCDEF", "11111111111141118111111111111111", f"{ONE}/..", f"{ONE}\n"])
def test_what_is_no_id_never_becomes_a_path(tmp_path: Path, name: str) -> None:
    store, runtimes = FileStore(tmp_path), FileRuntimes(tmp_path)
    for use in (store.image, store.part, store.remove_image, runtimes.folder, runtimes.manifest):
        with pytest.raises(OperationError) as caught:
            use(name)
        assert caught.value.code is ErrorCode.NOT_FOUND


def test_a_staged_runtime_holds_the_manifest_as_signed_and_links_in_merge_order(tmp_path: Path) -> None:
    runtimes = FileRuntimes(tmp_path)
    wanted = manifest(ONE, CONFIG, MODEL)
    folder = runtimes.stage(wanted)
    assert (folder / "manifest.json").read_bytes() == manifest_bytes(wanted)
    assert (folder / "confext/99-pose-config.raw").readlink() == Path(f"../../../images/{CONFIG.image_id}.raw")
    assert (folder / "sysext/98-pose-model.raw").readlink() == Path(f"../../../images/{MODEL.image_id}.raw")
    put(FileStore(tmp_path), MODEL, b"model")
    assert (folder / "sysext/98-pose-model.raw").read_bytes() == b"model"
    assert runtimes.stage(wanted) == folder
    assert runtimes.ids() == [ONE]
    assert runtimes.manifest(ONE) == wanted


def test_staging_again_repairs_what_was_changed_by_hand_and_half_staged_runtimes_do_not_count(tmp_path: Path) -> None:
    runtimes = FileRuntimes(tmp_path)
    wanted = manifest(ONE, MODEL)
    folder = runtimes.stage(wanted)
    (folder / "sysext/99-pose-model.raw").unlink()
    (folder / "sysext/99-pose-model.raw").symlink_to("/etc/passwd")
    runtimes.stage(wanted)
    assert (folder / "sysext/99-pose-model.raw").readlink() == Path(f"../../../images/{MODEL.image_id}.raw")
    half = tmp_path / "runtimes" / f".{TWO}.part"
    half.mkdir()
    (half / "manifest.json").write_bytes(manifest_bytes(manifest(TWO)))
    assert runtimes.ids() == [ONE]
    runtimes.stage(manifest(TWO, MODEL))
    assert runtimes.ids() == [ONE, TWO]
    assert not half.exists()


def test_the_module_index_is_a_link_over_the_others_and_follows_the_base(tmp_path: Path) -> None:
    runtimes = FileRuntimes(tmp_path)
    wanted = manifest(ONE, MODEL)
    folder = runtimes.stage(wanted, MODEL.image_id) / "sysext"
    assert sorted(path.name for path in folder.iterdir()) == ["99-pose-model.raw", "99-zz-module-index.raw"]
    assert str((folder / "99-zz-module-index.raw").readlink()) == f"../../../images/{MODEL.image_id}.raw"
    assert runtimes.module_index(ONE) == MODEL.image_id
    runtimes.activate(ONE, None)
    # The base has another kernel now, and then none: even the active runtime's is replaced, by one rename.
    runtimes.stage(wanted, CONFIG.image_id)
    assert runtimes.module_index(ONE) == CONFIG.image_id
    runtimes.stage(wanted)
    assert runtimes.module_index(ONE) is None
    assert [path.name for path in folder.iterdir()] == ["99-pose-model.raw"]
    runtimes.stage(wanted, CONFIG.image_id)
    (folder / "99-zz-module-index.raw").unlink()
    (folder / "99-zz-module-index.raw").symlink_to("/elsewhere.raw")
    assert runtimes.module_index(ONE) is None


@pytest.mark.parametrize("name", ["zz-module-index", "zzz"])
def test_no_extension_is_called_so_that_it_would_lie_over_the_module_index(name: str) -> None:
    with pytest.raises(ValueError, match="must sort before zz-module-index"):
        manifest(ONE, extension(name, b"x"))


def test_another_manifest_under_the_id_of_the_active_runtime_is_refused(tmp_path: Path) -> None:
    runtimes = FileRuntimes(tmp_path)
    runtimes.stage(manifest(ONE, MODEL))
    runtimes.activate(ONE, None)
    with pytest.raises(OperationError) as caught:
        runtimes.stage(manifest(ONE, CONFIG))
    assert caught.value.code is ErrorCode.BAD_MANIFEST
    assert runtimes.manifest(ONE) == manifest(ONE, MODEL)


def test_activation_is_one_rename_and_keeps_the_runtime_before_it(tmp_path: Path) -> None:
    runtimes = FileRuntimes(tmp_path)
    assert (runtimes.active(), runtimes.previous()) == (None, None)
    for runtime in (ONE, TWO):
        runtimes.stage(manifest(runtime, MODEL))
    runtimes.activate(ONE, None)
    runtimes.activate(TWO, ONE)
    assert (runtimes.active(), runtimes.previous()) == (TWO, ONE)
    assert (tmp_path / "active").readlink() == Path(f"runtimes/{TWO}")
    with pytest.raises(OperationError, match="it is the active one"):
        runtimes.remove(TWO)
    runtimes.remove(ONE)
    assert (runtimes.ids(), runtimes.previous()) == ([TWO], None)


def test_a_runtime_that_is_not_there_cannot_be_activated(tmp_path: Path) -> None:
    runtimes = FileRuntimes(tmp_path)
    with pytest.raises(OperationError) as caught:
        runtimes.activate(ONE, None)
    assert caught.value.message == f"cannot activate runtime {ONE}: it is not on this board"


@pytest.mark.parametrize("target", ["/etc", "runtimes/not-an-id", f"elsewhere/{ONE}"])
def test_an_active_link_that_leads_elsewhere_names_no_runtime(tmp_path: Path, target: str) -> None:
    (tmp_path / "active").symlink_to(target)
    assert FileRuntimes(tmp_path).active() is None


def test_an_image_that_cannot_be_read_any_more_does_not_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(tmp_path)
    put(store, MODEL, b"model")

    def broken(descriptor: int, size: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("agent.ports.files.os.read", broken)
    assert not store.verify_image(MODEL)
    monkeypatch.undo()
    assert "Input/output error" in caplog.text

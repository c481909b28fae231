"""Images: the same bytes from the same inputs on any machine, and nothing in them that a board trips over."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import struct
import subprocess
from pathlib import Path

import pytest

from agent.contract.errors import ErrorCode, OperationError
from agent.host import stage
from agent.host.build import build_runtime, earlier_images
from agent.host.bytecode import VARIABLE
from agent.host.elf import check_tree, loads_aligned
from agent.host.image import build_image
from agent.host.project import Project, load_project
from agent.host.report import Report

pytestmark = pytest.mark.skipif(shutil.which("mkfs.erofs") is None, reason="mkfs.erofs is not installed")

PROJECT = """\
default_target: virtual
supported_targets: [virtual]
runtimes:
  main: {version: "1.0", extensions: [model, app, conf]}
extensions:
  app:
    version: "1.0"
    overlay: tree
    enable_services: [pose.service]
    upholds: [app.service]
    reload_manager: true
    modes: {usr/share/app/secret: "0600"}
    python: {folder: usr/lib/app, packages: [code], launchers: {app: "code.main:run"}}
  model: {model: model}
  conf: {version: "1.0", types: [confext], files: {etc/app.toml: app.toml}}
"""
NO_ID = 0xFFFFFFFF
WEIGHTS = bytes(range(256)) * 256


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    monkeypatch.delenv(VARIABLE, raising=False)
    return make_project(tmp_path / "project")


def make_project(folder: Path) -> Project:
    (folder / "tree/usr/share/app").mkdir(parents=True)
    (folder / "tree/usr/bin").mkdir()
    (folder / "tree/usr/bin/tool").write_text("#!/bin/sh\n")
    (folder / "tree/usr/bin/tool").chmod(0o700)
    (folder / "tree/usr/share/app/text").write_text("text\n" * 1000)
    (folder / "tree/usr/share/app/secret").write_text("secret\n")
    (folder / "tree/usr/share/app/link").symlink_to("text")
    (folder / "code").mkdir()
    (folder / "code/__init__.py").write_text("")
    (folder / "code/main.py").write_text("def run() -> int:\n    return 0\n")
    (folder / "model").mkdir()
    (folder / "model/cpu.tflite").write_bytes(WEIGHTS)
    file = {"path": "cpu.tflite", "sha256": hashlib.sha256(WEIGHTS).hexdigest()}
    files = {"cpu": file, "virtual": file}
    (folder / "model/model.json").write_text(json.dumps({"version": "7", "files": files}))
    (folder / "app.toml").write_text("a = 1\n")
    (folder / "avocado.yaml").write_text(PROJECT)
    return load_project(folder)


def unpacked(image: Path, into: Path) -> Path:
    """The image as the kernel shows it, copied; mounted only while it is copied."""
    mount, copy = into / "mount", into / "copy"
    mount.mkdir(parents=True)
    tried = subprocess.run(["mount", "-t", "erofs", "-o", "ro,loop", image, mount], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"cannot mount an image here: {tried.stderr.strip()}")
    try:
        subprocess.run(["cp", "-a", mount, copy], check=True)
    finally:
        subprocess.run(["umount", mount], check=True)
    return copy


def test_the_same_inputs_give_the_same_bytes_wherever_they_lie_and_whatever_the_umask(
    project: Project, tmp_path: Path
) -> None:
    before = os.umask(0o077)
    try:
        other = make_project(tmp_path / "other place")
        strict = [build_image(other, name).extension for name in ("app", "model", "conf")]
    finally:
        os.umask(before)
    assert strict == [build_image(project, name).extension for name in ("app", "model", "conf")]


# Version 2: owner rwx, user 1234 rwx, group r-x, mask rwx, others r-x. What is made in the folder inherits it.
DEFAULT_ACL = struct.pack("<I" + "HHI" * 5, 2, 1, 7, NO_ID, 2, 7, 1234, 4, 5, NO_ID, 16, 7, NO_ID, 32, 5, NO_ID)


def test_owners_times_acls_and_notes_of_this_machine_are_not_in_the_bytes(project: Project, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    os.setxattr(folder, "system.posix_acl_default", DEFAULT_ACL)
    other = make_project(folder / "project")
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (1, 1), follow_symlinks=False)
        if os.geteuid() == 0:
            os.chown(path, 1234, 1234, follow_symlinks=False)
        if path.is_file() and not path.is_symlink():
            os.setxattr(path, "user.xdg.origin.url", b"https://host/file")
    there = [build_image(other, name).extension for name in ("app", "model", "conf")]
    assert there == [build_image(project, name).extension for name in ("app", "model", "conf")]


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file capabilities needs root")
def test_a_file_that_got_capabilities_makes_another_image(project: Project) -> None:
    tool = project.folder / "tree/usr/bin/tool"
    before = build_image(project, "app").extension
    net_raw = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)
    os.setxattr(tool, "security.capability", net_raw)
    after = build_image(project, "app")
    assert (after.is_new, after.extension.sha256 == before.sha256) == (True, False)
    assert net_raw in after.path.read_bytes()


def test_a_second_build_finds_everything_built_and_says_the_same(project: Project) -> None:
    first = build_runtime(project, None, Report(quiet=True))
    again = build_runtime(project, None, Report(quiet=True))
    assert [image.is_new for image in first.images] == [True, True, True]
    assert [image.is_new for image in again.images] == [False, False, False]
    assert again.manifest == first.manifest


def test_a_change_gives_a_new_runtime_and_going_back_gives_a_newer_one(project: Project) -> None:
    first = build_runtime(project, None, Report(quiet=True)).manifest
    config = project.folder / "app.toml"
    config.write_text("a = 2\n")
    second = build_runtime(project, None, Report(quiet=True)).manifest
    config.write_text("a = 1\n")
    third = build_runtime(project, None, Report(quiet=True)).manifest
    assert third.extensions == first.extensions
    assert len({first.id, second.id, third.id}) == 3
    assert first.built_at < second.built_at < third.built_at
    changed = second.extensions[2]
    assert [path.stem for path in earlier_images(project, second, 3)[changed.image_id]] == [
        first.extensions[2].image_id
    ]


def test_a_model_is_stored_plain(project: Project) -> None:
    data = build_image(project, "model").path.read_bytes()
    assert WEIGHTS in data
    assert b"text\n" * 1000 not in build_image(project, "app").path.read_bytes()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting an image needs root")
def test_an_image_has_normal_modes_root_as_owner_no_time_and_the_xattr(project: Project, tmp_path: Path) -> None:
    root = unpacked(build_image(project, "app").path, tmp_path)
    modes = {str(path.relative_to(root)): stat.S_IMODE(path.lstat().st_mode) for path in root.rglob("*")}
    assert modes["usr"] == modes["usr/bin"] == 0o755
    assert modes["usr/bin/tool"] == modes["usr/bin/app"] == 0o755
    assert modes["usr/share/app/text"] == 0o644
    assert modes["usr/share/app/secret"] == 0o600
    assert {(path.lstat().st_uid, int(path.lstat().st_mtime)) for path in root.rglob("*")} == {(0, 0)}
    release = root / "usr/lib/extension-release.d/extension-release.app"
    assert os.getxattr(release, "user.extension-release.strict") == b"0"
    assert release.read_text() == (
        'ID=debian\nVERSION_ID="13"\nARCHITECTURE=x86-64\nSYSEXT_SCOPE=system\nEXTENSION_RELOAD_MANAGER=1\n'
        'AVOCADO_ENABLE_SERVICES="pose.service"\n'
    ).replace("x86-64", {"x86_64": "x86-64", "aarch64": "arm64"}[project.target.arch])
    uphold = root / "usr/lib/systemd/system/multi-user.target.upholds/app.service"
    assert uphold.readlink() == Path("../app.service")
    assert (root / "usr/bin/app").read_text().startswith("#!/usr/bin/python3 -I\n")
    assert (root / "usr/lib/app/code/main.py").is_file()


def test_without_extended_attributes_it_says_what_to_do(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(stage.os, "setxattr", refuse)
    with pytest.raises(OperationError) as caught:
        build_image(project, "conf")
    assert caught.value.code is ErrorCode.BUILD_FAILED
    assert caught.value.message.startswith("cannot set the extended attribute user.extension-release.strict in ")
    assert caught.value.remedy == "Build on a file system with extended attributes, such as ext4, xfs or btrfs."


@pytest.mark.parametrize(
    ("inside", "said"),
    [
        ("etc/app.conf", "/etc is outside of what a sysext merges over"),
        ("usr/lib/os-release", "/usr/lib/os-release describes the base or another extension"),
        (
            "usr/lib/extension-release.d/extension-release.app",
            "/usr/lib/extension-release.d/extension-release.app describes the base or another extension",
        ),
    ],
)
def test_what_does_not_belong_into_an_extension_is_refused(project: Project, inside: str, said: str) -> None:
    path = project.folder / "tree" / inside
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    with pytest.raises(OperationError) as caught:
        build_image(project, "app")
    assert caught.value.message == f"cannot build app: {said}"


def test_a_special_file_is_refused(project: Project) -> None:
    os.mkfifo(project.folder / "tree/usr/share/app/pipe")
    with pytest.raises(OperationError, match=r"/pipe is not a file, folder or link$"):
        build_image(project, "app")


def test_a_model_of_another_accelerator_is_refused(project: Project) -> None:
    (project.folder / "model/model.json").write_text(json.dumps({"version": "7", "files": {"cpu": {}}}))
    with pytest.raises(OperationError, match=r"not prepared for virtual, only for cpu$"):
        build_image(project, "model")


def test_without_the_boards_python_it_says_that_images_carry_sources_only(project: Project) -> None:
    (notice,) = build_image(project, "app").notices
    assert notice.startswith("no CPython 3.13 here")


def test_a_compiler_of_another_version_is_a_mistake_not_an_absence(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "/bin/true")
    with pytest.raises(OperationError, match=r"is not a CPython 3\.13$"):
        build_image(project, "app")


def test_a_shared_object_whose_segments_no_loader_maps_is_found(tmp_path: Path) -> None:
    library = shutil.copy("/bin/true", tmp_path / "true.so")
    assert loads_aligned(Path(library))
    data = bytearray(Path(library).read_bytes())
    table = int.from_bytes(data[32:40], "little")
    size, count = int.from_bytes(data[54:56], "little"), int.from_bytes(data[56:58], "little")
    load = next(at for at in range(table, table + size * count, size) if data[at] == 1)
    data[load + 8] ^= 0x40
    Path(library).write_bytes(data)
    assert not loads_aligned(Path(library))
    with pytest.raises(OperationError, match=r"^cannot use true.so: "):
        check_tree(tmp_path, "x86_64")

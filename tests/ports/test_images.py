"""Looking inside real EROFS images, honest and not."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.contract.errors import ErrorCode, OperationError
from agent.ports.images import MountedImages
from agent.ports.protocols import Kind

FOLDERS = {Kind.SYSEXT: "usr/lib/extension-release.d", Kind.CONFEXT: "etc/extension-release.d"}
RELEASE = 'ID=debian\nVERSION_ID="13"\nAVOCADO_ENABLE_SERVICES="pose.service"\n'

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting an image needs root"),
    pytest.mark.skipif(shutil.which("mkfs.erofs") is None, reason="mkfs.erofs is not installed"),
    pytest.mark.skipif(not Path("/dev/loop-control").exists(), reason="there are no loop devices here"),
]


def image(
    folder: Path,
    change: Callable[[Path], object] = lambda folder: None,
    *,
    kind: Kind = Kind.SYSEXT,
    strict: bytes = b"0",
) -> Path:
    """An image with one release file for `pose-model`, after `change` had a look at its release folder."""
    tree = folder / "tree"
    release = tree / FOLDERS[kind] / "extension-release.pose-model"
    release.parent.mkdir(parents=True)
    release.write_text(RELEASE)
    if strict:
        os.setxattr(release, "user.extension-release.strict", strict)
    change(release.parent)
    made = folder / "image.raw"
    subprocess.run(["mkfs.erofs", "-x1", str(made), str(tree)], check=True, capture_output=True)
    return made


def refusal(path: Path, kind: Kind = Kind.SYSEXT) -> str:
    with pytest.raises(OperationError) as caught:
        MountedImages().release(path, "pose-model", kind)
    assert caught.value.code is ErrorCode.BAD_IMAGE
    assert caught.value.remedy == "Build the extension again with 'avocadoctl build' and deploy it."
    return caught.value.message.removeprefix(f"cannot merge extension pose-model ({path.name}): ")


def test_the_files_an_image_has_are_told_from_folders_links_and_what_it_lacks(tmp_path: Path) -> None:
    def more(release: Path) -> None:
        lib = release.parent
        (lib / "libpose.so").write_text("")
        (lib / "linked.so").symlink_to("libpose.so")
        (lib.parent / "lib64").symlink_to("lib")

    path = image(tmp_path, more)
    asked = [f"/usr/lib/{name}" for name in ("libpose.so", "linked.so", "extension-release.d", "absent.so")]
    asked += ["/usr/lib64/libpose.so", "/opt/x", "/usr/lib/libpose.so/x", "/"]
    # More questions than a process has descriptors.
    assert MountedImages().carried(path, asked * 400) == {"/usr/lib/libpose.so"}
    assert MountedImages().carried(path, []) == frozenset()
    path.write_bytes(b"no image")
    with pytest.raises(OperationError) as caught:
        MountedImages().carried(path, asked)
    assert caught.value.message == "cannot look into image image.raw: it is neither EROFS nor squashfs"


@pytest.mark.parametrize("kind", list(Kind))
def test_the_release_keys_are_read_and_no_mount_or_loop_device_is_left(tmp_path: Path, kind: Kind) -> None:
    path = image(tmp_path, kind=kind)
    keys = MountedImages().release(path, "pose-model", kind)
    assert keys == {"ID": "debian", "VERSION_ID": "13", "AVOCADO_ENABLE_SERVICES": "pose.service"}
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
    backing = [entry.read_text().strip() for entry in Path("/sys/block").glob("loop*/loop/backing_file")]
    assert str(path) not in backing


def test_the_links_for_merge_names_are_the_same_release_and_another_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    path = image(
        tmp_path / "a", lambda f: (f / "extension-release.98-pose-model").symlink_to("extension-release.pose-model")
    )
    assert MountedImages().release(path, "pose-model", Kind.SYSEXT)["ID"] == "debian"
    path = image(tmp_path / "b", lambda f: (f / "extension-release.98-pose-model").write_text("ID=_any\n"))
    assert refusal(path) == "it has a second release file extension-release.98-pose-model"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda f: (f / "extension-release.pose-model").rename(f / "extension-release.other"),
            "it has no release file extension-release.pose-model",
        ),
        (
            lambda f: (f.parent / "os-release").write_text("ID=other\n"),
            "it carries usr/lib/os-release, so systemd takes it for a whole system",
        ),
        (
            lambda f: (f / "extension-release.pose-model").write_bytes(b"\xff\xfe"),
            "extension-release.pose-model is not UTF-8",
        ),
        (
            lambda f: (f / "extension-release.pose-model").write_text("#" * 70_000),
            "extension-release.pose-model is larger than 65536 bytes",
        ),
    ],
)
def test_an_image_that_systemd_would_ignore_or_misread_is_refused(
    tmp_path: Path, change: Callable[[Path], object], message: str
) -> None:
    assert refusal(image(tmp_path, change)) == message


def test_a_release_file_or_folder_that_is_a_link_out_of_the_image_is_not_followed(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    (tmp_path / "secret").write_text("ID=secret\n")

    def link_file(folder: Path) -> None:
        (folder / "extension-release.pose-model").unlink()
        (folder / "extension-release.pose-model").symlink_to(tmp_path / "secret")

    def link_folder(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.symlink_to("/usr/lib/extension-release.d")

    assert "Too many levels of symbolic links" in refusal(image(tmp_path / "a", link_file))
    assert refusal(image(tmp_path / "b", link_folder)) == (
        "usr/lib/extension-release.d leads through something that is not a folder"
    )


def test_an_image_without_the_strict_attribute_is_refused(tmp_path: Path) -> None:
    message = "extension-release.pose-model lacks the attribute user.extension-release.strict=0"
    assert refusal(image(tmp_path, strict=b"")) == message


def test_what_is_no_image_is_refused_by_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "image.raw"
    assert refusal(path) == f"No such file or directory ({path})"
    path.write_bytes(b"")
    assert refusal(path) == "it is neither EROFS nor squashfs"
    path.write_bytes(os.urandom(8192))
    assert refusal(path) == "it is neither EROFS nor squashfs"
    path.write_bytes(b"hsqs" + bytes(60))
    assert refusal(path).startswith("it does not mount: ")
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert "Too many levels of symbolic links" in refusal(path)


def test_a_truncated_image_is_refused(tmp_path: Path) -> None:
    path = image(tmp_path, lambda f: (f / "payload").write_bytes(os.urandom(100_000)))
    whole = path.read_bytes()
    path.write_bytes(whole[:4096])
    assert refusal(path) == f"it is cut off: 4096 of {len(whole)} bytes"

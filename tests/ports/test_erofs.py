"""The small image writer, read back by the kernel and judged by EROFS's own checker."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.ports.erofs import image_of

FILES = {
    "usr/lib/modules/6.6.1/modules.dep": b"kernel/a.ko:\n" * 1000,
    "usr/lib/modules/6.6.1/exactly": bytes(range(256)) * 16,
    "usr/lib/extension-release.d/extension-release.x": b"ID=_any\n",
    "usr/empty": b"",
    # More names than one block of a folder holds.
    **{f"usr/many/{number:04d}-{'n' * 40}": str(number).encode() for number in range(300)},
}
ATTRIBUTES = {"usr/lib/extension-release.d/extension-release.x": {"extension-release.strict": b"0", "b": b"12345"}}


@contextmanager
def mounted(image: bytes, folder: Path) -> Iterator[Path]:
    path, where = folder / "image.raw", folder / "mounted"
    path.write_bytes(image)
    where.mkdir()
    subprocess.run(["mount", "-t", "erofs", "-o", "loop,ro", path, where], check=True, timeout=20)
    try:
        yield where
    finally:
        subprocess.run(["umount", where], check=True, timeout=20)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting an image needs root")
@pytest.mark.skipif(not Path("/dev/loop-control").exists(), reason="there are no loop devices here")
def test_the_kernel_reads_back_every_file_folder_and_attribute(tmp_path: Path) -> None:
    with mounted(image_of(FILES, ATTRIBUTES), tmp_path) as where:
        found = {str(path.relative_to(where)): path.read_bytes() for path in where.rglob("*") if path.is_file()}
        assert found == FILES
        assert len(list((where / "usr/many").iterdir())) == 300
        release = where / next(iter(ATTRIBUTES))
        assert os.getxattr(release, "user.extension-release.strict") == b"0"
        assert os.getxattr(release, "user.b") == b"12345"
        modes = {f"{path.stat().st_mode:o}" for path in where.rglob("*")}
        assert modes == {"100644", "40755"}
        assert (where / "usr").stat().st_nlink == 4


@pytest.mark.skipif(shutil.which("fsck.erofs") is None, reason="fsck.erofs is not installed")
def test_the_checker_of_erofs_finds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "image.raw"
    path.write_bytes(image_of(FILES, ATTRIBUTES))
    done = subprocess.run(["fsck.erofs", path], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def test_the_same_files_give_the_same_bytes_in_whatever_order() -> None:
    assert image_of(FILES, ATTRIBUTES) == image_of(dict(reversed(FILES.items())), ATTRIBUTES)

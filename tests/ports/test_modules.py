"""One module index over the base and every image, made by the real depmod and asked by the real modprobe."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Extension, image_id, sha256_hex
from agent.ports import modules
from agent.ports.files import FileStore
from agent.ports.module_child import left_out
from agent.ports.modules import DepmodIndexer
from tests.device.host import find_program

VERSION = "6.6.1-board"

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting an image needs root"),
    pytest.mark.skipif(not Path("/dev/loop-control").exists(), reason="there are no loop devices here"),
    pytest.mark.skipif(shutil.which("mkfs.erofs") is None, reason="mkfs.erofs is not installed"),
    pytest.mark.skipif(shutil.which("objcopy") is None, reason="objcopy is not installed: apt-get install binutils"),
]


@pytest.fixture(scope="module")
def depmod() -> None:
    if find_program("depmod", "kmod") is None:
        pytest.skip("depmod is not installed: apt-get install kmod")


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


def module(path: Path, depends: str = "") -> None:
    """The smallest file that depmod takes for a kernel module."""
    path.parent.mkdir(parents=True, exist_ok=True)
    info = path.with_suffix(".info")
    info.write_bytes(b"license=GPL\0" + (f"depends={depends}\0".encode() if depends else b""))
    machine = {"x86_64": "elf64-x86-64", "aarch64": "elf64-littleaarch64"}[os.uname().machine]
    line = ["objcopy", "-I", "binary", "-O", machine, "--rename-section", ".data=.modinfo", info, path]
    subprocess.run(line, check=True, timeout=20)
    info.unlink()


def indexer(store: FileStore) -> DepmodIndexer:
    return DepmodIndexer(store, "/proc/self/ns/mnt")


def stored(store: FileStore, name: str, tree: Path) -> Extension:
    made = tree.with_suffix(".raw")
    subprocess.run(["mkfs.erofs", made, tree], check=True, capture_output=True, timeout=60)
    data = made.read_bytes()
    sha256 = sha256_hex(data)
    fields: dict[str, Any] = {"name": name, "version": "1", "types": ["sysext"], "size_bytes": len(data)}
    extension = Extension(image_id=image_id(sha256), sha256=sha256, **fields)
    store.write_image(extension, data)
    return extension


def driver(store: FileStore, folder: Path, name: str) -> Extension:
    """An extension as distributions make them: a module, and an index that knows of nothing else."""
    tree = folder / name
    module(tree / f"usr/lib/modules/{VERSION}/extra/{name}.ko")
    (tree / f"usr/lib/modules/{VERSION}/modules.dep").write_text(f"extra/{name}.ko:\n")
    return stored(store, name, tree)


@pytest.mark.usefixtures("depmod")
def test_the_index_names_the_modules_of_every_image_whatever_index_each_brings(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "state")
    npu, cam = driver(store, tmp_path, "npu"), driver(store, tmp_path, "cam")
    made = indexer(store).index([npu, cam])
    assert made is not None
    assert made in store.image_ids()
    path = store.image(made)
    assert path is not None
    assert indexer(store).index([npu, cam]) == made  # the same bytes again
    with mounted(path.read_bytes(), tmp_path) as where:
        folder = where / "usr/lib/modules" / VERSION
        lines = (folder / "modules.dep").read_text().splitlines()
        assert {line.partition(":")[0] for line in lines} == {"extra/npu.ko", "extra/cam.ko"}
        assert {"modules.dep.bin", "modules.alias.bin", "modules.symbols.bin"} <= {p.name for p in folder.iterdir()}
        release = where / "usr/lib/extension-release.d/extension-release.zz-module-index"
        assert (release.read_text(), os.getxattr(release, "user.extension-release.strict")) == ("ID=_any\n", b"0")
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_where_no_image_brings_modules_there_is_no_index_and_depmod_is_not_asked(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "state")
    (tmp_path / "plain/usr/share").mkdir(parents=True)
    plain = stored(store, "plain", tmp_path / "plain")
    assert indexer(store).index([plain]) is None
    assert indexer(store).index([]) is None
    assert store.image_ids() == [plain.image_id]


def test_a_module_that_the_board_s_depmod_cannot_read_is_named() -> None:
    index = "kernel/fs/vfat.ko: kernel/lib/fat.ko\nkernel/lib/fat.ko:\nupdates/usb_cam.ko.xz:\n"
    # One in updates/ takes the place of the kernel's own.
    files = ["kernel/fs/vfat.ko", "kernel/lib/fat.ko", "kernel/usb-cam.ko", "updates/usb_cam.ko.xz", "modules.dep"]
    assert left_out(files, index) == []
    assert left_out([*files, "extra/npu.ko.zst"], index) == ["extra/npu.ko.zst"]


@pytest.mark.parametrize("name", ["-evil", "a b", "..x"])
def test_a_folder_that_is_no_kernel_version_never_reaches_a_command_line(tmp_path: Path, name: str) -> None:
    store = FileStore(tmp_path / "state")
    (tmp_path / "odd/usr/lib/modules" / name).mkdir(parents=True)
    with pytest.raises(OperationError) as caught:
        indexer(store).index([stored(store, "odd", tmp_path / "odd")])
    assert caught.value.message == f"cannot index the kernel modules: {name!r} is no kernel version"


def test_a_base_without_depmod_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules.child, "_compiled", _without_depmod(modules.child._compiled))
    store = FileStore(tmp_path / "state")
    with pytest.raises(OperationError) as caught:
        indexer(store).index([driver(store, tmp_path, "npu")])
    assert caught.value.code is ErrorCode.TOOL_MISSING
    assert caught.value.message == (
        f"cannot index the kernel modules of {VERSION}: depmod is not installed on this board"
    )
    assert caught.value.remedy == "Add kmod to the base, or leave the modules out of the extensions."


def _without_depmod(compiled: Any) -> Any:
    """The child's text, with other places to look for depmod in."""

    def compiled_without(module: Any) -> object:
        if module is not modules.module_child:
            return compiled(module)
        path = Path(module.__file__)
        text = path.read_text().replace('"/usr/sbin/depmod", "/usr/bin/depmod"', '"/nowhere/depmod",')
        assert "/nowhere" in text
        return compile(text, str(path), "exec", dont_inherit=True)

    return compiled_without

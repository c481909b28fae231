"""A child process that makes one index over the kernel modules of the base and of every image of a set.

Started by ports/modules.py with a request on stdin: `images`, paths, lowest first, and `namespace`, the board's. Each
image that brings modules brings an index of its own, whole files all of them, and merged one of them would hide the
others' modules and the base's. So here, where nobody sees it, all of them are put together as the merge will, and
depmod reads them. It answers with one JSON object: `files` (path below usr/lib/modules -> base64; none where no image
brings modules), or `error`.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.release import Kind
from agent.ports import image_child, mounts
from agent.ports.hierarchies import LAYOUTS, enter_host, is_ours
from agent.ports.process import run_checked

_MODULES = "usr/lib/modules"
_BASE = Path("/", _MODULES)
_ROOT = Path("/tmp/root")  # noqa: S108 - a file system of this child's own
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+~-]{0,63}")
_MODULE = re.compile(r"(?P<name>[^/]+)\.ko(\.(gz|xz|zst))?\Z")
_TOOLS = ("/usr/sbin/depmod", "/usr/bin/depmod")
_DEPMOD_TIMEOUT_S = 60.0
_READ_BY_DEPMOD = ("modules.order", "modules.builtin", "modules.builtin.modinfo")


def main(argv: list[str]) -> int:
    """Do what the request says and print how it went."""
    request = json.load(sys.stdin)
    try:
        answer: dict[str, Any] = {"files": _index(request["images"], request["namespace"])}
    except OperationError as error:
        answer = {"error": error.as_dict()}
    except mounts.RefusedError as refused:
        answer = {"error": _failed(str(refused)).as_dict()}
    except OSError as cause:
        answer = {"error": _failed(image_child.said(cause)).as_dict()}
    json.dump(answer, sys.stdout)
    return 0


def _index(images: list[str], namespace: str) -> dict[str, str]:
    enter_host(namespace)
    mounts.own_namespace()
    # What is merged now belongs to another set: here the base shows itself.
    while is_ours("/usr", f"/usr/{LAYOUTS[Kind.SYSEXT].folder}"):
        mounts.unmount("/usr")
    descriptors = [image_child.open_image(image) for image in images]
    mounts.mount("tmpfs", "/tmp", "tmpfs", 0)  # noqa: S108
    layers = [folder for descriptor in descriptors if (folder := _modules_of(descriptor)) is not None]
    versions = sorted({name for folder in layers for name in _versions(folder)})
    if not versions:
        return {}
    # Where depmod of a base whose modules are below /usr looks too.
    _ROOT.mkdir()
    (_ROOT / "usr").symlink_to(".")
    found: dict[str, str] = {}
    for version in versions:
        found |= _indexed(version, [_BASE, *layers])
    return found


def _modules_of(descriptor: int) -> Path | None:
    where = Path(f"/tmp/images/{descriptor}")  # noqa: S108
    where.mkdir(parents=True)
    mounts.mount_image(descriptor, str(where), mounts.MS_NOSUID | mounts.MS_NODEV | mounts.MS_NOEXEC)
    os.close(descriptor)
    # An image that leads elsewhere by a link is not followed.
    folders = [where.joinpath(*_MODULES.split("/")[:depth]) for depth in (1, 2, 3)]
    return folders[-1] if all(folder.is_dir() and not folder.is_symlink() for folder in folders) else None


def _versions(folder: Path) -> Iterator[str]:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            if not _VERSION.fullmatch(entry.name):
                raise mounts.RefusedError(f"{entry.name!r} is no kernel version")
            yield entry.name


def _indexed(version: str, layers: list[Path]) -> dict[str, str]:
    tool = next((path for path in _TOOLS if os.access(path, os.X_OK)), None)
    if tool is None:
        raise OperationError(
            ErrorCode.TOOL_MISSING,
            f"cannot index the kernel modules of {version}: depmod is not installed on this board",
            "Add kmod to the base, or leave the modules out of the extensions.",
        )
    files = _files(version, layers)
    # An overlay that depmod could write to would take more rights than the agent has, and links are as good.
    made = _ROOT / "lib/modules" / version
    for path, there in files.items():
        (made / path).parent.mkdir(parents=True, exist_ok=True)
        (made / path).symlink_to(there)
    run_checked([tool, "-b", str(_ROOT), version], _DEPMOD_TIMEOUT_S, failure=ErrorCode.BAD_IMAGE)
    if lost := left_out(files, (made / "modules.dep").read_text(encoding="utf-8")):
        raise _failed(f"depmod on this board cannot read {lost[0]} of {version}")
    return {
        f"{version}/{path.name}": base64.b64encode(path.read_bytes()).decode()
        for path in sorted(made.iterdir())
        if path.is_file() and not path.is_symlink()
    }


def _files(version: str, layers: list[Path]) -> dict[str, Path]:
    """What depmod reads, as the merge will show it: a higher image's file takes the place of a lower one's."""
    found: dict[str, Path] = {}
    for layer in layers:
        for folder, _, names in os.walk(layer / version):
            for name in names:
                path = Path(folder, name)
                inside = str(path.relative_to(layer / version))
                if (_MODULE.search(name) or inside in _READ_BY_DEPMOD) and path.is_file() and not path.is_symlink():
                    found[inside] = path
    return found


def left_out(files: Iterable[str], index: str) -> list[str]:
    """Module files of which the text of a modules.dep knows no module, such as ones in a compression it cannot read."""
    known = {_module(line.partition(":")[0]) for line in index.splitlines()}
    # By name, since a module in updates/ takes the place of the one that the kernel came with.
    return sorted(path for path in files if (name := _module(path)) and name not in known)


def _module(path: str) -> str:
    found = _MODULE.search(path)
    return found["name"].replace("-", "_") if found else ""


def _failed(why: str) -> OperationError:
    return OperationError(
        ErrorCode.BAD_IMAGE,
        f"cannot index the kernel modules: {why}",
        "Build the extension again with 'avocadoctl build' and deploy it.",
    )

"""The first runtime goes into a board's root file system, so that its first boot merges it with none of our code.

Promises that what a later deploy relies on is there: the images, the runtime as it was signed, the link the boot
follows, the trust anchor, the board's identity, the two symlinks and the enabled systemd services. Refuses a base that
lacks what the extensions need, naming everything it lacks at once, and a root file system that is in use already.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Manifest, parse_manifest
from agent.host.base_check import missing
from agent.host.report import Report
from agent.host.root_fs import RootFs
from agent.host.target import Target
from agent.ports.privacy import READABLE, ROOT_ONLY

STATE = "/var/lib/avocado"
_MERGED_FOLDERS = {"sysext": "/var/lib/extensions", "confext": "/var/lib/confexts"}
_SERVICES = ("systemd-sysext.service", "systemd-confext.service")
_UNIT_FOLDERS = ("/usr/lib/systemd/system", "/lib/systemd/system")


@dataclass(frozen=True, slots=True)
class FirstRuntime:
    """What is put onto the board: a signed manifest, its images by id, and the trusted TUF root."""

    manifest_bytes: bytes
    images: Mapping[str, Path]
    root_metadata: bytes


def provision(
    root: Path, target: Target, first: FirstRuntime, packages: list[str], report: Report, *, replace: bool = False
) -> dict[str, Any]:
    """Make the root file system boot this runtime. Raises `requirement-unmet`, or `usage` when it has one already."""
    base = RootFs(root)
    manifest = parse_manifest(first.manifest_bytes)
    if manifest.target != target.board:
        raise OperationError(
            ErrorCode.WRONG_TARGET, f"cannot provision {root} for {target.board}: runtime is for {manifest.target}"
        )
    lacks = missing(base, target, packages)
    if lacks:
        raise OperationError(
            ErrorCode.REQUIREMENT_UNMET,
            f"cannot provision {root} for {target.board}: " + "; ".join(lacks),
            "Add what is missing to the base image, then run the same command again.",
            {"missing": lacks},
        )
    if base.path(f"{STATE}/active").is_symlink() and not replace:
        raise OperationError(
            ErrorCode.USAGE,
            f"cannot provision {root}: it has a runtime already",
            "Use `avocadoctl deploy` on the running board, or add --replace to start over.",
        )
    _forget(base)
    _close(base)
    report.show(f"provisioning {base.root}")
    _seed_runtime(base, manifest, first)
    base.write(f"{STATE}/metadata/root.json", first.root_metadata)
    identity = {"target": target.board, "arch": target.arch}
    base.write(f"{STATE}/board.json", (json.dumps(identity, sort_keys=True) + "\n").encode())
    for kind, folder in _MERGED_FOLDERS.items():
        base.link(folder, f"{STATE}/active/{kind}")
    for service in _SERVICES:
        _enable(base, service)
    # Last: until here the board boots as it did before.
    base.link(f"{STATE}/active", f"runtimes/{manifest.id}")
    report.clear()
    return {"root": str(base.root), "target": target.board, "runtime": manifest.id, "images": sorted(first.images)}


def _close(base: RootFs) -> None:
    """The folders of the state, as closed as the agent keeps them: a board has users before its agent starts first.

    The group that may read them is the board's to know: until the agent has set it, only root reads.
    """
    for name in READABLE:
        base.folder(f"{STATE}/{name}", 0o750)
    for name in ROOT_ONLY:
        base.folder(f"{STATE}/{name}", 0o700)


def _seed_runtime(base: RootFs, manifest: Manifest, first: FirstRuntime) -> None:
    runtime = f"{STATE}/runtimes/{manifest.id}"
    base.write(f"{runtime}/manifest.json", first.manifest_bytes)
    images = base.folder(f"{STATE}/images")
    for kind in _MERGED_FOLDERS:
        base.folder(f"{runtime}/{kind}")
    for extension in manifest.extensions:
        name = f"{extension.image_id}.raw"
        part = images / f".{name}.new"
        shutil.copyfile(first.images[extension.image_id], part)
        part.chmod(0o600)
        part.replace(images / name)
        for kind in extension.types:
            base.link(f"{runtime}/{kind}/{manifest.link_name(extension)}", f"../../../images/{name}")


def _forget(base: RootFs) -> None:
    """What an earlier provision left: a half-made one is started over, never continued."""
    for part in ("runtimes", "images", "metadata", "changes"):
        folder = base.path(f"{STATE}/{part}")
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
    for link in ("active", "previous"):
        base.path(f"{STATE}/{link}").unlink(missing_ok=True)


def _enable(base: RootFs, service: str) -> None:
    """What `systemctl enable` does, without running a program of the board's."""
    text = next((text for folder in _UNIT_FOLDERS if (text := base.read(f"{folder}/{service}"))), "")
    wanted_by = [line.split("=", 1)[1].split() for line in text.splitlines() if line.startswith("WantedBy=")]
    if not wanted_by:
        raise OperationError(
            ErrorCode.REQUIREMENT_UNMET, f"cannot enable {service} in {base.root}: the base has no such unit"
        )
    for unit in (unit for units in wanted_by for unit in units):
        base.link(f"/etc/systemd/system/{unit}.wants/{service}", f"/usr/lib/systemd/system/{service}")

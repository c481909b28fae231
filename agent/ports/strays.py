"""What lies in the folders of the agent and of systemd that nobody deployed: copies, sidecar files, edited links.

It only looks, and past the lock files that systemd leaves beside the images it opens. A folder that systemd scans by
suffix is told apart from one that it never sees, because there a stray is merged at the next boot, or makes systemd
refuse the whole set. Nothing is opened or followed, and nothing is removed: it is somebody's file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from agent.contract.manifest import MODULE_INDEX_LINK, Manifest
from agent.extensions import Problem, boot_link_problem, link_problem, stray_problem
from agent.ports.files import PART_SUFFIXES
from agent.ports.protocols import Kind

_ID = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_IMAGE = re.compile(rf"{_ID}\.raw")
# With what an interrupted fetch goes on with; a power cut may leave one without the other.
_OURS = re.compile(rf"{_ID}\.(raw|{'|'.join(PART_SUFFIXES)})")
_BOOT_FOLDERS = {Kind.SYSEXT: "var/lib/extensions", Kind.CONFEXT: "var/lib/confexts"}
# Where else systemd 257 looks. /usr/lib and /usr/local/lib belong to the base.
_OTHER_FOLDERS = ("etc/extensions", "run/extensions", "run/confexts")


class Strays:
    """Looks through a state folder and, with `root`, through the folders systemd merges from."""

    def __init__(self, state: Path, root: Path | None) -> None:
        self._state = state
        self._root = root

    def find(self, manifests: Mapping[str, Manifest]) -> list[Problem]:
        """A problem for each, with what to type."""
        found = [stray_problem(str(path), merges=False) for path in self._beside_images()]
        for runtime, manifest in manifests.items():
            found.extend(self._beside_links(self._state / "runtimes" / runtime, manifest))
        if self._root is not None:
            found.extend(self._in_boot_folders(self._root))
        return found

    def _beside_images(self) -> Iterator[Path]:
        for path in _listed(self._state / "images"):
            if not (_OURS.fullmatch(path.name) and path.is_file() and not path.is_symlink()):
                yield path

    def _beside_links(self, folder: Path, manifest: Manifest) -> Iterator[Problem]:
        for kind in Kind:
            links = {
                manifest.link_name(extension): f"../../../images/{extension.image_id}.raw"
                for extension in manifest.extensions
                if kind.value in extension.types
            }
            present = {path.name: path for path in _listed(folder / kind)}
            for name, path in present.items():
                if name not in links and not _is_index(kind, path) and not _is_half_made(path, links):
                    yield stray_problem(str(path), merges=_is_scanned(path))
            for name, target in links.items():
                path = folder / kind / name
                if name not in present or not path.is_symlink() or str(path.readlink()) != target:
                    yield link_problem(str(path), target, present=name in present)

    def _in_boot_folders(self, root: Path) -> Iterator[Problem]:
        for kind, where in _BOOT_FOLDERS.items():
            path, target = root / where, self._state / "active" / kind
            if not path.is_symlink() or path.readlink() != target:
                yield boot_link_problem(str(path), str(target))
        for where in _OTHER_FOLDERS:
            for path in _listed(root / where):
                if _is_scanned(path):
                    yield stray_problem(str(path), merges=True)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not _is_lock(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_lock(path: Path) -> bool:
    """What systemd locks an image with, `.#NAME.lck`; the file stays when the lock is gone."""
    return path.name.startswith(".#") and path.name.endswith(".lck") and path.is_file() and not path.is_symlink()


def _is_half_made(path: Path, links: Mapping[str, str]) -> bool:
    """A link of ours that a power cut kept from its name (files.rename_link_durably)."""
    name = path.name.removeprefix(".").removesuffix(".tmp")
    return path.name == f".{name}.tmp" and name in (*links, MODULE_INDEX_LINK) and path.is_symlink()


def _is_index(kind: Kind, path: Path) -> bool:
    if kind is not Kind.SYSEXT or path.name != MODULE_INDEX_LINK or not path.is_symlink():
        return False
    folder, image = path.readlink().parent, path.readlink().name
    return str(folder) == "../../../images" and _IMAGE.fullmatch(image) is not None


def _is_scanned(path: Path) -> bool:
    """Whether systemd takes it for an image: `.raw`, `.raw.v`, or a folder; a leading dot does not keep it out."""
    return path.name.endswith((".raw", ".raw.v")) or path.is_dir()

"""The runtimes on disk: `runtimes/<id>`, and the links `active` and `previous` beside them.

A runtime's folder has the signed manifest and the links that systemd merges, and is put in place whole, by one rename:
a folder of that name is a runtime, whatever is wrong with what is in it. One whose manifest is damaged or lost is put
right by the same manifest, never by another.
"""

from __future__ import annotations

import json
import logging
import shutil
import stat
from pathlib import Path

from agent.contract.disk import disk_errors
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.linked import Links
from agent.contract.manifest import (
    MAX_MANIFEST_BYTES,
    MODULE_INDEX_LINK,
    Manifest,
    manifest_bytes,
    parse_manifest,
)
from agent.ports.files import checked_id, entries, is_id, rename_link_durably, sync_folder, write_durably
from agent.ports.overlay_merged import linked_images
from agent.ports.protocols import Kind

REPAIR = "Deploy again from the host: avocadoctl deploy -H BOARD"

_LOG = logging.getLogger("avocado.files")
_INDEX = f"{Kind.SYSEXT}/{MODULE_INDEX_LINK}"


class FileRuntimes:
    """The Runtimes port on a folder: `runtimes/<id>` and the links `active` and `previous` beside it."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._runtimes = state / "runtimes"

    def stage(self, manifest: Manifest, module_index: str | None = None) -> Path:
        """runtimes/<id> complete and durable: the manifest as signed, and its links, put in place by one rename."""
        final = self.folder(manifest.id)
        links = _links(manifest)
        if _is_staged(final, manifest, links):
            self.point_index(manifest.id, module_index)
            return final
        if _is_folder(final) and manifest.id in (self.active(), self.previous()):
            self._repair(final, manifest, links)
            self.point_index(manifest.id, module_index)
            return final
        part = self._runtimes / f".{manifest.id}.part"
        with disk_errors(final):
            self._runtimes.mkdir(parents=True, exist_ok=True)
            _remove_tree(part)
            for kind in Kind:
                (part / kind.value).mkdir(parents=True)
            if module_index is not None:
                links[_INDEX] = _image_link(module_index)
            for name, target in links.items():
                (part / name).symlink_to(target)
            for kind in Kind:
                sync_folder(part / kind.value)
        write_durably(part / "manifest.json", manifest_bytes(manifest))
        with disk_errors(final):
            self._discard(final)
            part.rename(final)
            sync_folder(self._runtimes)
        return final

    def module_index(self, runtime_id: str) -> str | None:
        """The image with this runtime's module index, if it has one."""
        return _index_of(self.folder(runtime_id))

    def _repair(self, folder: Path, manifest: Manifest, links: dict[str, str]) -> None:
        """A runtime that boards boot is never taken away: what is lost of it is written again, and nothing moves."""
        try:
            same = self.manifest(manifest.id) == manifest
        except OperationError:
            # Its links tell which images it had; a link that is lost tells nothing.
            found = {
                f"{kind}/{name}.raw": image
                for kind, named in self.links(manifest.id).items()
                for name, image in named.items()
            }
            same = all(links.get(name) == _image_link(image) for name, image in found.items())
        if not same:
            raise OperationError(
                ErrorCode.BAD_MANIFEST,
                f"cannot stage runtime {manifest.id}: another manifest of that id is in use on this board",
                "Build the runtime again, so that it gets an id of its own.",
            )
        path = folder / "manifest.json"
        if path.is_dir() and not path.is_symlink():
            with disk_errors(path):
                shutil.rmtree(path)
        write_durably(path, manifest_bytes(manifest))
        for kind in Kind:
            with disk_errors(folder / kind):
                (folder / kind).mkdir(exist_ok=True)
        for name, target in links.items():
            if not _leads_to(folder / name, target):
                rename_link_durably(folder / name, target)

    def point_index(self, runtime_id: str, image_id: str | None) -> Path:
        """This image is the runtime's module index; None: it has none. Gives the runtime's folder."""
        folder = self.folder(runtime_id)
        if image_id == _index_of(folder):
            return folder
        if image_id is not None:
            rename_link_durably(folder / _INDEX, _image_link(image_id))
            return folder
        with disk_errors(folder):
            (folder / _INDEX).unlink()
            sync_folder((folder / _INDEX).parent)
        return folder

    def remove(self, runtime_id: str) -> None:
        """runtimes/<id> is gone; the active one is never removed."""
        if runtime_id == self.active():
            raise OperationError(
                ErrorCode.UNSUPPORTED,
                f"cannot remove runtime {runtime_id}: it is the active one",
                "Activate another runtime first: avocadoctl runtime list",
            )
        with disk_errors(self._runtimes):
            if runtime_id == self.previous():
                (self._state / "previous").unlink()
                sync_folder(self._state)
            self._discard(self.folder(runtime_id))

    def _discard(self, folder: Path) -> None:
        # Renamed first: a half-deleted runtime must never look like a staged one.
        doomed = folder.with_name(f".{folder.name}.removed")
        _remove_tree(doomed)
        if folder.is_dir():
            folder.rename(doomed)
            sync_folder(self._runtimes)
            _remove_tree(doomed)

    def ids(self) -> list[str]:
        """Every staged runtime, whatever became of its manifest, and the active one even where its folder is lost."""
        found = {path.name for path in entries(self._runtimes) if is_id(path.name) and _is_folder(path)}
        active = self.active()
        return sorted(found | {active} if active else found)

    def links(self, runtime_id: str) -> Links:
        """What the runtime's links lead to, the board's own index left out; no kind whose folder does not tell."""
        folder = self.folder(runtime_id)
        found: dict[Kind, dict[str, str]] = {}
        for kind in Kind:
            try:
                if (folder / kind).is_dir():
                    found[kind] = linked_images(folder / kind)
            except OSError as error:
                _LOG.error("cannot read %s: %s", folder / kind, error.strerror)
        for named in found.values():
            named.pop(MODULE_INDEX_LINK.removesuffix(".raw"), None)
        return found

    def manifest(self, runtime_id: str) -> Manifest:
        """The stored manifest. Raises `not-found`; `bad-manifest` or `newer-schema` where it is damaged or lost."""
        folder = self.folder(runtime_id)
        try:
            with (folder / "manifest.json").open("rb") as stream:
                data = stream.read(MAX_MANIFEST_BYTES + 1)
        except OSError as cause:
            if isinstance(cause, FileNotFoundError) and not _is_folder(folder) and runtime_id != self.active():
                raise OperationError(
                    ErrorCode.NOT_FOUND,
                    f"cannot read runtime {runtime_id}: it is not on this board",
                    "See which are: avocadoctl runtime list",
                ) from cause
            raise self._unreadable(ErrorCode.BAD_MANIFEST, runtime_id, cause.strerror or str(cause)) from cause
        try:
            manifest = parse_manifest(data)
        except OperationError as cause:
            why = cause.message.removeprefix("cannot read the manifest: ")
            raise self._unreadable(cause.code, runtime_id, why, cause.remedy) from cause
        if manifest.id != runtime_id:
            raise self._unreadable(ErrorCode.BAD_MANIFEST, runtime_id, f"it is runtime {manifest.id}'s")
        return manifest

    def _unreadable(self, code: ErrorCode, runtime_id: str, why: str, remedy: str = "") -> OperationError:
        return OperationError(
            code,
            f"cannot read the manifest of runtime {runtime_id}: {why}",
            remedy or (REPAIR if runtime_id == self.active() else f"Run: avocadoctl runtime remove {runtime_id}"),
        )

    def active(self) -> str | None:
        """The runtime the next boot merges."""
        return self._linked("active")

    def previous(self) -> str | None:
        """The runtime before it."""
        return self._linked("previous")

    def _linked(self, name: str) -> str | None:
        try:
            target = Path((self._state / name).readlink())
        except OSError:
            return None
        return target.name if is_id(target.name) and target.parent.name == "runtimes" else None

    def folder(self, runtime_id: str) -> Path:
        """runtimes/<id>, whether or not it exists."""
        return self._runtimes / checked_id(runtime_id)

    def activate(self, runtime_id: str, previous: str | None) -> None:
        """`previous` set, then `active` renamed, directory synced. That rename is the commit of a change."""
        # The way back leads to a runtime whose manifest is lost, too: the boot follows its links.
        if not _is_folder(self.folder(runtime_id)):
            raise OperationError(ErrorCode.NOT_FOUND, f"cannot activate runtime {runtime_id}: it is not on this board")
        if previous is not None and previous != self.previous():
            rename_link_durably(self._state / "previous", f"runtimes/{checked_id(previous)}")
        rename_link_durably(self._state / "active", f"runtimes/{runtime_id}")


def _links(manifest: Manifest) -> dict[str, str]:
    return {
        f"{kind}/{manifest.link_name(extension)}": _image_link(extension.image_id)
        for extension in manifest.extensions
        for kind in extension.types
    }


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def _leads_to(link: Path, target: str) -> bool:
    try:
        return str(link.readlink()) == target
    except OSError:
        return False


def _image_link(image_id: str) -> str:
    return f"../../../images/{image_id}.raw"


def _index_of(folder: Path) -> str | None:
    try:
        target = (folder / _INDEX).readlink()
    except OSError:
        return None
    return target.stem if is_id(target.stem) and str(target) == _image_link(target.stem) else None


def _is_staged(folder: Path, manifest: Manifest, links: dict[str, str]) -> bool:
    try:
        same = json.loads((folder / "manifest.json").read_bytes()) == json.loads(manifest_bytes(manifest))
        found = {
            f"{kind.value}/{path.name}": str(path.readlink()) for kind in Kind for path in (folder / kind).iterdir()
        }
    except (OSError, ValueError):
        return False
    found.pop(_INDEX, None)
    return same and found == links


def _remove_tree(folder: Path) -> None:
    # A trial's bind mount is read-only: this fails on it rather than empty another runtime.
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)

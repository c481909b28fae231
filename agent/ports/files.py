"""What is on disk: durable writes, the image store, and the runtimes with their two links.

A durable write is a temporary file in the same folder, fsync, rename, fsync of the folder: one function here. What a
transfer remembers of itself, a hint beside its part, agent/transfer.py writes in the same order. A link is replaced in
the same way. After a power cut the old content or the new one is there, never a mixture and never nothing. Names that
become paths are ids, checked before they are joined.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import stat
import uuid
from pathlib import Path

from agent.contract.disk import disk_errors
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import (
    MAX_MANIFEST_BYTES,
    MODULE_INDEX_LINK,
    Extension,
    Manifest,
    manifest_bytes,
    parse_manifest,
)
from agent.contract.manifest import image_id as id_of_image
from agent.ports.protocols import Kind

_LOG = logging.getLogger("avocado.files")
_CHUNK = 1 << 20
_INDEX = f"{Kind.SYSEXT}/{MODULE_INDEX_LINK}"
# What agent/transfer.py leaves of an image that did not arrive whole.
PART_SUFFIXES = ("part", "progress", "progress-new")


def write_durably(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Replace the file's content so that a power cut leaves the old content or the new one.

    Raises `no-space` or `disk-failed`, as everything here that writes.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        try:
            os.fchmod(descriptor, mode)
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.rename(path)
        sync_folder(path.parent)


def rename_link_durably(link: Path, target: str | Path) -> None:
    """Make `link` a symbolic link to `target`, by one rename and a sync of its folder."""
    temporary = link.with_name(f".{link.name}.tmp")
    with disk_errors(link):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.rename(link)
        sync_folder(link.parent)


def sync_folder(folder: Path) -> None:
    """The folder's entries are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checked_id(text: str) -> str:
    try:
        canonical = str(uuid.UUID(text))
    except ValueError as cause:
        raise OperationError(ErrorCode.NOT_FOUND, f"cannot use {text!r}: it is not an id") from cause
    if canonical != text:
        raise OperationError(ErrorCode.NOT_FOUND, f"cannot use {text!r}: it is not a lower-case canonical id")
    return canonical


def _is_id(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False


def hash_file(path: Path) -> str:
    """Lower-case sha256 hex of the file's bytes, as the disk has them."""
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        # Read back from the disk, not from the cache the write left.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        while chunk := os.read(descriptor, _CHUNK):
            digest.update(chunk)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


class FileStore:
    """The Store port on a folder: `images/<image_id>.raw`, written once and never in place."""

    def __init__(self, state: Path) -> None:
        self._images = state / "images"

    def image(self, image_id: str) -> Path | None:
        """The path of a complete image, or None. A link or a folder of that name is not an image."""
        path = self._images / f"{_checked_id(image_id)}.raw"
        try:
            return path if stat.S_ISREG(path.lstat().st_mode) else None
        except FileNotFoundError:
            return None

    def part(self, image_id: str) -> Path:
        """Where an image is assembled before it is complete."""
        part = self._images / f"{_checked_id(image_id)}.part"
        with disk_errors(part):
            self._images.mkdir(parents=True, exist_ok=True)
        return part

    def finish_image(self, extension: Extension) -> Path:
        """The part is synced, read back, hashed and renamed into place. Raises `hash-mismatch`."""
        part = self.part(extension.image_id)
        with disk_errors(part):
            descriptor = os.open(part, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            found = hash_file(part)
        if found != extension.sha256:
            with disk_errors(part):
                part.unlink()
            raise OperationError(
                ErrorCode.HASH_MISMATCH,
                f"cannot store image {extension.name} {extension.version}: its bytes hash to {found[:12]}..., "
                f"the manifest says {extension.sha256[:12]}...",
                "Deploy again; if it happens again, check the disk.",
            )
        final = self._images / f"{extension.image_id}.raw"
        with disk_errors(final):
            # Others mount it and read it; nobody writes it again.
            part.chmod(0o444)
            part.rename(final)
            sync_folder(self._images)
        return final

    def write_image(self, extension: Extension, data: bytes) -> Path:
        """An image that was made on the board is in place. Raises `no-space`."""
        part = self.part(extension.image_id)
        with disk_errors(part):
            part.write_bytes(data)
        return self.finish_image(extension)

    def verify_image(self, extension: Extension) -> bool:
        """The stored image is there and its bytes still hash to its name."""
        return self._hash(extension.image_id) == extension.sha256

    def verify_made(self, image_id: str) -> bool:
        """As `verify_image`, of an image that was made on this board: nobody signed a hash, so its name has to do."""
        found = self._hash(image_id)
        return found is not None and id_of_image(found) == image_id

    def _hash(self, image_id: str) -> str | None:
        path = self.image(image_id)
        try:
            return None if path is None else hash_file(path)
        except OSError as error:
            # A block that cannot be read any more is damage like any other: the image is fetched, or made, again.
            _LOG.error("cannot read image %s: %s", path, error.strerror)
            return None

    def image_ids(self) -> list[str]:
        """Every complete image."""
        if not self._images.is_dir():
            return []
        names = (path.stem for path in self._images.glob("*.raw") if path.is_file() and not path.is_symlink())
        return sorted(name for name in names if _is_id(name))

    def begun(self) -> dict[str, int]:
        """Every image of which a part is there, or what was remembered of one, and the bytes of the disk it takes."""
        found: dict[str, int] = {}
        for path in sorted(self._images.iterdir()) if self._images.is_dir() else ():
            name, _, suffix = path.name.partition(".")
            if suffix in PART_SUFFIXES and _is_id(name):
                found[name] = found.get(name, 0) + path.lstat().st_blocks * 512
        return found

    def remove_image(self, image_id: str) -> None:
        """The image and its part are gone."""
        image = self._images / f"{_checked_id(image_id)}.raw"
        with disk_errors(image):
            image.unlink(missing_ok=True)
        self.remove_part(image_id)

    def remove_part(self, image_id: str) -> None:
        """The part of the image is gone, and what was remembered of it."""
        part = self._images / f"{_checked_id(image_id)}.part"
        with disk_errors(part):
            for suffix in PART_SUFFIXES:
                part.with_suffix(f".{suffix}").unlink(missing_ok=True)
            if self._images.is_dir():
                sync_folder(self._images)

    def free_bytes(self) -> int:
        """What an unprivileged writer could still write."""
        figures = os.statvfs(self._images if self._images.is_dir() else self._images.parent)
        return figures.f_bavail * figures.f_frsize


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
            self._point_index(final, module_index)
            return final
        if manifest.id in (self.active(), self.previous()):
            raise OperationError(
                ErrorCode.BAD_MANIFEST,
                f"cannot stage runtime {manifest.id}: another manifest of that id is in use on this board",
                "Build the runtime again, so that it gets an id of its own.",
            )
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

    def _point_index(self, folder: Path, image_id: str | None) -> None:
        # The base has got another kernel since the runtime was staged.
        if image_id == _index_of(folder):
            return
        if image_id is not None:
            rename_link_durably(folder / _INDEX, _image_link(image_id))
            return
        with disk_errors(folder):
            (folder / _INDEX).unlink()
            sync_folder((folder / _INDEX).parent)

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
        """Every staged runtime."""
        if not self._runtimes.is_dir():
            return []
        return sorted(path.parent.name for path in self._runtimes.glob("*/manifest.json") if _is_id(path.parent.name))

    def manifest(self, runtime_id: str) -> Manifest:
        """The stored manifest. Raises `not-found` or `bad-manifest`."""
        path = self.folder(runtime_id) / "manifest.json"
        try:
            with path.open("rb") as stream:
                data = stream.read(MAX_MANIFEST_BYTES + 1)
        except FileNotFoundError as cause:
            raise OperationError(
                ErrorCode.NOT_FOUND,
                f"cannot read runtime {runtime_id}: it is not on this board",
                "See which are: avocadoctl runtime list",
            ) from cause
        try:
            return parse_manifest(data)
        except OperationError as cause:
            why = cause.message.removeprefix("cannot read the manifest: ")
            raise OperationError(
                cause.code,
                f"cannot read the manifest of runtime {runtime_id}: {why}",
                cause.remedy or "Deploy again from the host: avocadoctl deploy -H BOARD",
            ) from cause

    def active(self) -> str | None:
        """The runtime the next boot merges."""
        return self._linked("active")

    def previous(self) -> str | None:
        """The runtime before it."""
        return self._linked("previous")

    def _linked(self, name: str) -> str | None:
        try:
            target = Path((self._state / name).readlink())
        except (FileNotFoundError, OSError):
            return None
        return target.name if _is_id(target.name) and target.parent.name == "runtimes" else None

    def folder(self, runtime_id: str) -> Path:
        """runtimes/<id>, whether or not it exists."""
        return self._runtimes / _checked_id(runtime_id)

    def activate(self, runtime_id: str, previous: str | None) -> None:
        """`previous` set, then `active` renamed, directory synced. That rename is the commit of a change."""
        if not (self.folder(runtime_id) / "manifest.json").is_file():
            raise OperationError(ErrorCode.NOT_FOUND, f"cannot activate runtime {runtime_id}: it is not on this board")
        if previous is not None and previous != self.previous():
            rename_link_durably(self._state / "previous", f"runtimes/{_checked_id(previous)}")
        rename_link_durably(self._state / "active", f"runtimes/{runtime_id}")


def _links(manifest: Manifest) -> dict[str, str]:
    return {
        f"{kind}/{manifest.link_name(extension)}": _image_link(extension.image_id)
        for extension in manifest.extensions
        for kind in extension.types
    }


def _image_link(image_id: str) -> str:
    return f"../../../images/{image_id}.raw"


def _index_of(folder: Path) -> str | None:
    try:
        target = (folder / _INDEX).readlink()
    except OSError:
        return None
    return target.stem if _is_id(target.stem) and str(target) == _image_link(target.stem) else None


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

"""What is on disk: durable writes, and the image store. The runtimes are in runtimes.py.

A durable write is a temporary file in the same folder, fsync, rename, fsync of the folder: one function here. What a
transfer remembers of itself, a hint beside its part, agent/transfer.py writes in the same order. A link is replaced in
the same way. After a power cut the old content or the new one is there, never a mixture and never nothing. Names that
become paths are ids, checked before they are joined.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import uuid
from pathlib import Path

from agent.contract.disk import disk_errors
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Extension
from agent.contract.manifest import image_id as id_of_image

_LOG = logging.getLogger("avocado.files")
_CHUNK = 1 << 20
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


def entries(folder: Path) -> list[Path]:
    """What is in the folder, as far as it can be read; a folder that is not there is empty."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        _LOG.error("cannot read %s: %s", folder, error.strerror)
        return []


def checked_id(text: str) -> str:
    """An id, before it becomes part of a path. Raises `not-found`."""
    try:
        canonical = str(uuid.UUID(text))
    except ValueError as cause:
        raise OperationError(ErrorCode.NOT_FOUND, f"cannot use {text!r}: it is not an id") from cause
    if canonical != text:
        raise OperationError(ErrorCode.NOT_FOUND, f"cannot use {text!r}: it is not a lower-case canonical id")
    return canonical


def is_id(text: str) -> bool:
    """Whether this is a lower-case canonical id."""
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
        path = self._images / f"{checked_id(image_id)}.raw"
        try:
            return path if stat.S_ISREG(path.lstat().st_mode) else None
        except FileNotFoundError:
            return None
        except OSError as error:
            _LOG.error("cannot read image %s: %s", path, error.strerror)
            return None

    def part(self, image_id: str) -> Path:
        """Where an image is assembled before it is complete."""
        part = self._images / f"{checked_id(image_id)}.part"
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
        names = (path.stem for path in entries(self._images) if path.suffix == ".raw")
        return sorted(name for name in names if is_id(name) and self.image(name) is not None)

    def begun(self) -> dict[str, int]:
        """Every image of which a part is there, or what was remembered of one, and the bytes of the disk it takes."""
        found: dict[str, int] = {}
        for path in entries(self._images):
            name, _, suffix = path.name.partition(".")
            if suffix in PART_SUFFIXES and is_id(name):
                with contextlib.suppress(OSError):  # gone meanwhile, or it cannot be gone on with
                    found[name] = found.get(name, 0) + path.lstat().st_blocks * 512
        return found

    def remove_image(self, image_id: str) -> None:
        """The image and its part are gone."""
        image = self._images / f"{checked_id(image_id)}.raw"
        with disk_errors(image):
            image.unlink(missing_ok=True)
        self.remove_part(image_id)

    def remove_part(self, image_id: str) -> None:
        """The part of the image is gone, and what was remembered of it."""
        part = self._images / f"{checked_id(image_id)}.part"
        with disk_errors(part):
            for suffix in PART_SUFFIXES:
                part.with_suffix(f".{suffix}").unlink(missing_ok=True)
            if self._images.is_dir():
                sync_folder(self._images)

    def free_bytes(self) -> int:
        """What an unprivileged writer could still write."""
        figures = os.statvfs(self._images if self._images.is_dir() else self._images.parent)
        return figures.f_bavail * figures.f_frsize

"""Makes the transfers of a repository, or finds them made before.

An image's id is its content, so a transfer between two ids holds for ever. Those made with the best effort are kept in
a folder beside the images and hard-linked into every repository that offers them; they go when their image goes. A
transfer made in a hurry is not kept. A file is named for its hash and for what it is, and is hashed before it is
offered again: one that was damaged meanwhile is made anew.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from agent.contract.delta import Transfer, chunk_bytes_for
from agent.delta.describe import read_info
from agent.delta.encode import Effort, encode_delta
from agent.delta.stream import file_chunks, file_sha256
from agent.host.alone import alone

Progress = Callable[[str, int, int], None]  # what is encoded, bytes done, of how many


@dataclass(frozen=True, slots=True)
class TransferCache:
    """Transfers in `folder`, of images that lie in `images` as `<image_id>.raw`."""

    folder: Path
    images: Path

    def find(self, name: str) -> Path | None:
        """The transfer of that name, if it was made before and its bytes are what they were."""
        return next((path for path in self.folder.glob(f"[!.]*.{name}") if is_whole(path)), None)

    def keep(self, name: str, file: Path) -> None:
        """Remember a finished transfer."""
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = self.folder / hashed_name(file_sha256(file), name)
        with self._alone():
            _link(file, kept)

    def prune(self) -> None:
        """What makes an image that is no longer here goes with it."""
        if not self.folder.is_dir():
            return
        with self._alone():  # what another process is just linking bears a name that makes no image
            for path in self.folder.iterdir():
                made = path.stem.partition(".")[2].rpartition("--")[2]
                if not (self.images / f"{made}.raw").exists():
                    path.unlink()

    def _alone(self) -> AbstractContextManager[None]:
        return alone(self.folder.with_suffix(".lock"), f"write into {self.folder}")


def make_transfer(
    targets: Path,
    base: Path | None,
    image: Path,
    name: str,
    *,
    effort: Effort,
    cache: TransferCache | None,
    progress: Progress | None,
) -> Transfer:
    """The transfer of that name is in `targets`, under its content's name as well; its signed description."""
    part = targets / f".{name}.{os.getpid()}.new"
    found = cache.find(name) if cache else None
    if found is None or not _linked(found, part):
        report = (lambda done, total: progress(name, done, total)) if progress else None
        encode_delta(base, image, part, effort=effort, progress=report)
        if cache and effort is Effort.BEST:
            cache.keep(name, part)
    transfer = describe_transfer(part, name)
    part.replace(targets / hashed_name(transfer.sha256, name))
    return transfer


def hashed_name(sha256: str, name: str) -> str:
    """What a file of that hash is called, in a repository and in the cache."""
    return f"{sha256}.{name}"


def is_whole(file: Path) -> bool:
    """The file is there, and its bytes hash to its name."""
    return file.is_file() and file.name.startswith(f"{file_sha256(file)}.")


def describe_transfer(file: Path, name: str) -> Transfer:
    """The signed description of a transfer file."""
    info = read_info(file)
    size = file.stat().st_size
    step = chunk_bytes_for(size)
    digest = hashlib.sha256()
    chunks: list[str] = []
    for chunk in file_chunks(file, piece_bytes=step):
        digest.update(chunk)
        chunks.append(hashlib.sha256(chunk).hexdigest())
    return Transfer(
        name,
        size,
        digest.hexdigest(),
        info.result_sha256,
        info.result_size_bytes,
        step,
        tuple(chunks),
        info.base_sha256,
        info.base_size_bytes,
    )


def _linked(found: Path, part: Path) -> bool:
    try:
        _link(found, part)
    except FileNotFoundError:  # another process found its image gone meanwhile
        return False
    return True


def _link(source: Path, destination: Path) -> None:
    """The same bytes under another name: whole from its first moment, in place of what was there."""
    part = destination.with_name(f".{destination.name}.{os.getpid()}.link")
    try:
        part.hardlink_to(source)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(source, part)
    part.replace(destination)

"""Where a prepared model goes: looked at before any work, replaced whole or not at all.

Only what an earlier `prepare` wrote is ever replaced: a folder whose model.json can be read and that holds nothing but
the files it names. Anything else that is there is somebody's own and stays. The new folder is filled beside the old
one, and they change places by two renames; when the second fails, the first is taken back.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from inference.errors import InferenceError
from inference.model import DOCUMENT, read_document

_ANOTHER = "name another folder with --out"


@dataclass(frozen=True, slots=True)
class Earlier:
    """The model that stands where the new one goes."""

    version: str
    accelerators: tuple[str, ...]

    def replaced_by(self, accelerators: Sequence[str]) -> str:
        """For a person: what goes, and which board would be left without a file."""
        lost = [name for name in self.accelerators if name not in accelerators]
        return f"replaces version {self.version}" + (f", which was also for {', '.join(lost)}" if lost else "")


class Destination:
    """`out` with a scratch folder beside it, to be filled and put in its place."""

    def __init__(self, named: Path, out: Path, scratch: Path, earlier: Earlier | None) -> None:
        self.earlier = earlier
        self.folder = scratch / "new"
        self._named, self._out, self._old = named, out, scratch / "old"

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """The folder to fill; what the disk refuses is said in our words."""
        with _translated(self._named):
            yield self.folder

    def replace(self) -> None:
        """Put what was filled in the place of what was there."""
        with _translated(self._named):
            was_there = self._out.exists()
            if was_there:
                self._out.rename(self._old)
            try:
                self.folder.rename(self._out)
            except BaseException:
                if was_there:
                    self._old.rename(self._out)
                raise


@contextmanager
def open_destination(named: Path, inputs: Sequence[Path]) -> Iterator[Destination]:
    """Refuse `named` unless nothing of anybody's is lost there; `inputs` are what the work reads."""
    with _translated(named):
        out = named.resolve()
        earlier = _look_at(named, out, inputs)
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=out.parent, prefix=".prepare-")
    with scratch as folder:
        found = Destination(named, out, Path(folder), earlier)
        with found.writing() as new:
            new.mkdir()
        yield found


def _look_at(named: Path, out: Path, inputs: Sequence[Path]) -> Earlier | None:
    for path in inputs:
        if out == path.resolve() or out in path.resolve().parents:
            raise InferenceError(f"cannot write {named}: {path} lies there and would be deleted", _ANOTHER)
    try:
        status = out.stat()
    except FileNotFoundError:
        return None
    if not stat.S_ISDIR(status.st_mode):
        raise InferenceError(f"cannot write {named}: it is not a folder", _ANOTHER)
    if _is_mounted(out):
        raise InferenceError(
            f"cannot write {named}: it is a mount point, which cannot be replaced", "name a folder inside it with --out"
        )
    held = sorted(out.iterdir())
    return _earlier(named, out, held) if held else None


def _is_mounted(out: Path) -> bool:
    # ismount() alone does not see a folder bound over one of the same file system.
    if os.path.ismount(out):
        return True
    try:
        mounts = Path("/proc/self/mountinfo").read_bytes().splitlines()
    except OSError:
        return False
    return os.fsencode(out).replace(b" ", rb"\040") in {line.split(b" ")[4] for line in mounts}


def _earlier(named: Path, out: Path, held: Sequence[Path]) -> Earlier:
    if not (out / DOCUMENT).is_file():
        raise _not_ours(named, f"{held[0].name} is there and no {DOCUMENT}")
    try:
        document = read_document(out)
    except InferenceError as error:
        raise _not_ours(named, error.message.removeprefix(f"cannot load model {out}: ")) from error
    ours = {DOCUMENT, *document.digests, *(file.path for file in document.files.values())}
    for path in held:
        if path.name not in ours or path.is_symlink() or not path.is_file():
            raise _not_ours(named, f"{path.name} is there, and {DOCUMENT} names no such file")
    return Earlier(document.version, tuple(document.files))


def _not_ours(named: Path, cause: str) -> InferenceError:
    return InferenceError(
        f"cannot write {named}: it holds more than an earlier model: {cause}", f"{_ANOTHER}, or empty that one"
    )


@contextmanager
def _translated(named: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        # Until Python 3.13 a loop of links is a RuntimeError.
        cause = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise InferenceError(f"cannot write {named}: {cause}", _ANOTHER) from error

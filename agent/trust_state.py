"""What a board keeps of its trust: the provisioned root, a cache, and a record that outlives the cache.

`root.json` is the anchor; provisioning writes it and nothing here does. `cache/` is python-tuf's: whatever in it does
not read strictly is left out and fetched again. `seen.json` holds the versions accepted last, with the keys they were
signed under, and is written durably, so that losing the cache forgets nothing; `seen.copy.json` is the same once more.
When one is damaged the other holds; when neither reads it is named, and nothing is trusted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from agent.contract.delta import RELEASES
from agent.contract.disk import disk_errors
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import format_time, parse_time
from agent.signed_json import check_metadata, read_strictly

SCHEMA = 1
ROLES = ("root", "timestamp", "snapshot", "targets", RELEASES)
MAX_ROOT_BYTES = 64 * 1024
MAX_METADATA_BYTES = 4 << 20
_CACHED = ("timestamp.json", "snapshot.json", "targets.json", f"{RELEASES}.json")
SEEN_NAMES = ("seen.json", "seen.copy.json")
_EPOCH = format_time(datetime(1970, 1, 1, tzinfo=UTC))

Write = Callable[[Path, bytes], None]


@dataclass(frozen=True, slots=True)
class Seen:
    """The second record: the versions accepted last, and the newest signed `built_at`."""

    root: int = 0
    timestamp: int = 0
    snapshot: int = 0
    targets: int = 0
    releases: int = 0
    built_at: str = _EPOCH
    # The key ids of each role in the root and the delegation of that time: see floor().
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def floor(self, role: str, keys: tuple[str, ...]) -> int:
        """The least version of a role that is accepted when these keys are named for it.

        After an attacker signed version 2^53 with a stolen key no ordinary version counts as newer. TUF's way out
        (5.3.11) is to replace every key of the role: what the old keys signed can then not come back.
        """
        known = self.keys.get(role)
        if role != "root" and known and keys and not set(known) & set(keys):
            return 0
        return int(getattr(self, role))


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A folder that is gone after the block. Raises as `disk_errors` does."""
    where = Path(os.environ.get("TMPDIR", "/tmp"), prefix)  # noqa: S108 - for the message
    with disk_errors(where), tempfile.TemporaryDirectory(prefix=prefix) as folder:
        yield Path(folder)


def read_anchor(folder: Path) -> bytes:
    """The provisioned root, as bytes. Raises `trust-state-damaged`."""
    path = folder / "root.json"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_ROOT_BYTES)
        check_metadata(data, path.name)
    except (OSError, OperationError) as cause:
        raise damaged_anchor(_why(cause), path) from cause
    return data


def damaged_anchor(why: str, path: Path | str = "root.json") -> OperationError:
    """The error for a provisioned root that cannot be used."""
    return OperationError(
        ErrorCode.TRUST_STATE_DAMAGED,
        f"cannot trust any repository: the provisioned {path} does not read ({why})",
        "Provision this board again with 'avocadoctl provision'; its runtimes stay.",
    )


def _why(cause: Exception) -> str:
    if isinstance(cause, OperationError):
        return cause.message.rpartition("root.json: ")[2].rpartition("seen.json: ")[2]
    return getattr(cause, "strerror", None) or str(cause)


def load_seen(folder: Path) -> Seen:
    """The second record; a board that has seen nothing has none. Raises `trust-state-damaged`, never forgets."""
    first, second = (_load_one(folder / name) for name in SEEN_NAMES)
    if isinstance(first, Seen) and isinstance(second, Seen):
        return max(first, second, key=lambda seen: (seen.root, seen.timestamp, seen.built_at))
    for one in (first, second):
        if isinstance(one, Seen):
            return one
    for one in (first, second):
        if isinstance(one, OperationError):
            raise one
    return Seen()


def problems(folder: Path) -> list[OperationError]:
    """What of the trust state is damaged; the next refresh that succeeds writes all but the anchor again.

    A board that was never provisioned has nothing that could be.
    """
    found: list[OperationError] = []
    if not any(_is_there(folder / name) for name in ("root.json", *SEEN_NAMES)):
        return found
    try:
        read_anchor(folder)
    except OperationError as error:
        found.append(error)
    for name in SEEN_NAMES:
        one = _load_one(folder / name)
        if isinstance(one, OperationError):
            found.append(one)
    cache = folder / "cache"
    for name in _CACHED if _is_there(cache) else ():
        if not _is_sound(cache / name, name):
            found.append(
                OperationError(
                    ErrorCode.TRUST_STATE_DAMAGED,
                    f"cannot use {cache / name}: it does not read",
                    "Nothing is lost: the next deploy fetches it again, and accepts nothing older than what was seen.",
                )
            )
    return found


class Watch:
    """`problems` for who asks every few seconds: read again only after a file has changed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamp: list[tuple[int, int] | None] = []
        self._found: list[OperationError] = []

    def problems(self) -> list[OperationError]:
        """What of the trust state is damaged now."""
        names = ("root.json", *SEEN_NAMES, *(f"cache/{name}" for name in _CACHED))
        stamp = [_stamp(self._folder / name) for name in names]
        if stamp != self._stamp:
            self._stamp, self._found = stamp, problems(self._folder)
        return self._found


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _load_one(path: Path) -> Seen | OperationError | None:
    try:
        document = read_strictly(path.read_bytes(), path.name, booleans=frozenset())
    except FileNotFoundError:
        return None
    except (OSError, OperationError) as cause:
        return _damaged(path, _why(cause))
    try:
        if document["schema"] > SCHEMA:
            return OperationError(
                ErrorCode.NEWER_SCHEMA, f"cannot read {path}: schema {document['schema']}", "Update the agent first."
            )
        parse_time(document["built_at"])
        return Seen(
            root=int(document["root"]),
            timestamp=int(document["timestamp"]),
            snapshot=int(document["snapshot"]),
            targets=int(document["targets"]),
            releases=int(document["releases"]),
            built_at=document["built_at"],
            keys={role: tuple(map(str, found)) for role, found in document.get("keys", {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as cause:
        return _damaged(path, f"{type(cause).__name__}: {cause}")


def _damaged(path: Path, why: str) -> OperationError:
    return OperationError(
        ErrorCode.TRUST_STATE_DAMAGED,
        f"cannot trust any repository: {path} is damaged ({why})",
        "If nobody tampered with this board, remove it and its copy, and deploy from your own host, not from a "
        "repository.",
    )


def keep_seen(folder: Path, seen: Seen, write: Write) -> None:
    """Both records say this, one after the other: a power cut leaves one that reads."""
    for name in SEEN_NAMES:
        if _load_one(folder / name) != seen:
            write(folder / name, _seen_bytes(seen))


def _seen_bytes(seen: Seen) -> bytes:
    return (json.dumps({"schema": SCHEMA, **asdict(seen)}, sort_keys=True) + "\n").encode()


def copy_sound(cache: Path, work: Path) -> None:
    """The cached files that still read strictly; whatever else lies there is left out and fetched again."""
    names = [*_CACHED, *(f"root_history/{path.name}" for path in cache.glob("root_history/*.root.json"))]
    with disk_errors(work):
        (work / "root_history").mkdir()
        for name in names:
            if _is_sound(cache / name, name):
                (work / name).write_bytes((cache / name).read_bytes())


def _is_sound(path: Path, name: str) -> bool:
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_METADATA_BYTES:
            return False
        check_metadata(path.read_bytes(), name)
    except (OSError, OperationError):  # a block that cannot be read is damage like any other
        return False
    return True


def _is_there(path: Path) -> bool:
    """Also where nobody can look at it: then it is damaged."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def keep_documents(work: Path, cache: Path, write: Write) -> None:
    """The accepted documents, where the next refresh finds them. Losing one costs a download and forgets nothing.

    Raises `no-space` or `disk-failed`.
    """
    with disk_errors(cache):
        _make_room(cache)
        roots = [f"root_history/{path.name}" for path in (work / "root_history").iterdir()]
        for name in [*roots, *_CACHED]:
            data = (work / name).read_bytes()
            path = cache / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            if not _holds(path, data):
                write(path, data)


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.is_file() and path.read_bytes() == data
    except OSError:
        return False


def _make_room(cache: Path) -> None:
    if cache.is_symlink() or (cache.exists() and not cache.is_dir()):
        cache.unlink()
    for folder in (cache, cache / "root_history"):
        if folder.exists() and not folder.is_dir():
            folder.unlink()
        folder.mkdir(exist_ok=True, mode=0o755)

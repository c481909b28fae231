"""What is merged now, as systemd itself says, and which images it is made of, where that can be known.

Both adapters of the Overlay port read it here and hold what they did against it: a job that is `done`, or a mount that
succeeded, is not the proof. Names come from `systemd-sysext status`. Images come from the mark an overlay of ours
carries; for one that systemd made, from `active`, provided that the link is older than the overlay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import MODULE_INDEX_LINK
from agent.ports.hierarchies import LAYOUTS, MARK
from agent.ports.process import run_checked
from agent.ports.protocols import Kind, MergedSet

_STATUS_TIMEOUT_S = 15.0
_MAX_MARK_BYTES = 64 * 1024
_TOOLS = {Kind.SYSEXT: "systemd-sysext", Kind.CONFEXT: "systemd-confext"}
_LINK = re.compile(r"(?P<link>[0-9]{2}-[a-z0-9][a-z0-9_-]{0,62})\.raw")
_TARGET = re.compile(r"\.\./\.\./\.\./images/(?P<image_id>[0-9a-f-]{36})\.raw")


def linked_images(folder: Path) -> dict[str, str]:
    """Link name without `.raw` -> image id, lowest first; what is no link to an image of ours is left out."""
    found: dict[str, str] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = _LINK.fullmatch(path.name)
        target = _TARGET.fullmatch(str(path.readlink())) if path.is_symlink() else None
        if name and target:
            found[name["link"]] = target["image_id"]
    return found


def of_extensions(merged: MergedSet) -> MergedSet:
    """Without the board's own module index, which comes and goes with the runtime and is no extension of it."""
    link = MODULE_INDEX_LINK.removesuffix(".raw")
    names = {kind: tuple(name for name in found if name != link) for kind, found in merged.names.items()}
    images = {k: {name: image for name, image in found.items() if name != link} for k, found in merged.images.items()}
    return replace(merged, names=names, images=images)


@dataclass(frozen=True, slots=True)
class _Known:
    """What was read of one kind, and what has to be unchanged for it to hold."""

    overlays: object
    active: object
    names: tuple[str, ...]
    since_us: int
    images: Mapping[str, str] | None


class MergedReader:
    """Asks systemd, and asks again only after something was mounted over a hierarchy or `active` was renamed."""

    def __init__(self, state: Path) -> None:
        self._active = state / "active"
        self._known: dict[Kind, _Known] = {}

    def read(self) -> MergedSet:
        """The merged names and, per kind, the images, where they are known. Raises `switch-failed`."""
        found = {kind: self._read(kind) for kind in Kind}
        return MergedSet(
            {kind: known.names for kind, known in found.items()},
            {kind: _said_time(known.since_us) for kind, known in found.items() if known.since_us},
            {kind: known.images for kind, known in found.items() if known.images is not None},
        )

    def _read(self, kind: Kind) -> _Known:
        overlays, active = _overlay_marks(kind), _mark(self._active, follow=False)
        known = self._known.get(kind)
        if known is not None and (known.overlays, known.active) == (overlays, active):
            return known
        names, since_us = _read_status(kind)
        # What an overlay is made of does not change when somebody moves the link.
        same = known is not None and known.overlays == overlays
        images = known.images if known is not None and same else self._images(kind, names, since_us)
        self._known[kind] = known = _Known(overlays, active, names, since_us, images)
        return known

    def require(self, wanted: Mapping[Kind, tuple[str, ...]], anew: Iterable[Kind] = tuple(Kind)) -> None:
        """Exactly these names are merged, says systemd, asked anew of these kinds. Raises `switch-failed`."""
        for kind in anew:
            self._known.pop(kind, None)
        found = self.read()
        for kind in Kind:
            missing = sorted(set(wanted[kind]) - set(found.names[kind]))
            surplus = sorted(set(found.names[kind]) - set(wanted[kind]))
            if missing or surplus:
                raise OperationError(
                    ErrorCode.SWITCH_FAILED,
                    f"cannot merge the {kind} set: missing {', '.join(missing) or 'nothing'}, "
                    f"not wanted {', '.join(surplus) or 'nothing'}",
                    f"See which image systemd ignored: journalctl -b -n 20 -u {_TOOLS[kind]}.service",
                    {"missing": missing, "surplus": surplus},
                )

    def _images(self, kind: Kind, names: tuple[str, ...], since_us: int) -> Mapping[str, str] | None:
        if not names:
            return {}
        layout = LAYOUTS[kind]
        marked = [m for where in layout.hierarchies if (m := _read_mark(Path(where, layout.folder))) is not None]
        if any(marked):
            return marked[0] if all(m == marked[0] for m in marked) and tuple(sorted(marked[0])) == names else None
        if since_us * 1000 < (_mark(self._active, follow=False) or (0, 0, 1 << 63))[2]:
            return None  # renamed after systemd merged: who knows what it named then
        try:
            active = linked_images(self._active / kind)
        except OSError:
            return None
        return active if tuple(active) == names else None


def _overlay_marks(kind: Kind) -> object:
    """Differs after every merge: each overlay is a file system of its own, with marker files made anew."""
    layout = LAYOUTS[kind]
    return [
        _mark(path, follow=True)
        for where in layout.hierarchies
        for path in (Path(where), Path(where, layout.folder, layout.plural))
    ]


def _mark(path: Path, *, follow: bool) -> tuple[int, ...]:
    try:
        found = path.stat(follow_symlinks=follow)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    return (found.st_dev, found.st_ino, found.st_mtime_ns)


def _read_mark(folder: Path) -> dict[str, str] | None:
    try:
        with (folder / MARK).open(encoding="utf-8") as stream:
            lines = stream.read(_MAX_MARK_BYTES).splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return {} if folder.is_dir() else None
    return dict(line.split(" ", 1) for line in lines if " " in line)


def _read_status(kind: Kind) -> tuple[tuple[str, ...], int]:
    tool = _TOOLS[kind]
    finished = run_checked([tool, "status", "--json=short"], _STATUS_TIMEOUT_S, failure=ErrorCode.SWITCH_FAILED)
    try:
        return parse_status(json.loads(finished.stdout))
    except (ValueError, KeyError, TypeError) as cause:
        raise OperationError(ErrorCode.SWITCH_FAILED, f"cannot read what {tool} status says") from cause


def parse_status(rows: list[dict[str, Any]]) -> tuple[tuple[str, ...], int]:
    """Merged names, lowest first, and since when (µs, 0: unknown), from `status --json=short`; one row a hierarchy."""
    names: set[str] = set()
    since = 0
    for row in rows:
        extensions = row["extensions"]
        if isinstance(extensions, list):
            names.update(extensions)
            if isinstance(row.get("since"), int):
                since = row["since"]
    return tuple(sorted(names)), since


def _said_time(since_us: int) -> str:
    return datetime.fromtimestamp(since_us / 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

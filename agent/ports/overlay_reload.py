"""The Overlay port through systemd's own services: a bind mount over the active links, then a reload.

For a trial the new runtime's link folder is bind-mounted, by PID 1, over the folder `active` names; systemd then merges
what it finds there. The mount is gone after a reboot, and so the trial with it. There is a gap of some milliseconds in
every reload; the gapless adapter is for boards that cannot have one. A job that is `done` can still mean that nothing
was merged (an image that does not match this OS is ignored), so the result is read afterwards.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agent.contract.errors import ErrorCode, OperationError
from agent.ports.process import run_checked
from agent.ports.protocols import Kind, MergedSet
from agent.ports.systemd import SystemdUnits

_STATUS_TIMEOUT_S = 15.0
_SERVICES = {Kind.SYSEXT: "systemd-sysext.service", Kind.CONFEXT: "systemd-confext.service"}
_TOOLS = {Kind.SYSEXT: "systemd-sysext", Kind.CONFEXT: "systemd-confext"}
_MARKERS = (
    Path("/usr"),
    Path("/usr/.systemd-sysext/extensions"),
    Path("/opt/.systemd-sysext/extensions"),
    Path("/etc"),
    Path("/etc/.systemd-confext/extensions"),
)
_UNIT_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:_.")


class ReloadOverlay:
    """The Overlay port on systemd-sysext.service and systemd-confext.service."""

    def __init__(self, units: SystemdUnits, state: Path) -> None:
        self._units = units
        self._state = state
        self._known: tuple[object, MergedSet] | None = None

    def merged(self) -> MergedSet:
        """What systemd itself says is merged. It is asked again only after something was mounted over a hierarchy."""
        marks = _marks()
        known = self._known
        if known is None or known[0] != marks:
            read = {kind: _read_status(kind) for kind in Kind}
            merged = MergedSet(
                {kind: names for kind, (names, _) in read.items()},
                {kind: since for kind, (_, since) in read.items() if since},
            )
            self._known = known = (marks, merged)
        return known[1]

    def show(self, runtime: Path | None, timeout_s: float) -> None:
        """The running overlay is exactly this runtime folder's set (None: nothing merged); a reboot forgets it."""
        deadline = time.monotonic() + timeout_s
        for kind in Kind:
            self._take_mounts_away(kind, deadline)
        if runtime is None:
            for kind in Kind:
                self._units.stop(_SERVICES[kind], _left(deadline))
        else:
            active = self._active_folder()
            for kind in Kind:
                self._place(kind, runtime, active, deadline)
            before = self.merged()
            for kind in Kind:
                # Reloading an empty set is a pointless gap in /etc.
                if link_names(runtime / kind) or before.names[kind]:
                    self._reload(kind, _left(deadline))
        self._check(runtime)

    def settle(self, timeout_s: float) -> None:
        """The trial's bind mounts are gone; `active` names the same set, so nothing visible changes."""
        deadline = time.monotonic() + timeout_s
        for kind in Kind:
            self._take_mounts_away(kind, deadline)

    def _active_folder(self) -> Path:
        link = self._state / "active"
        try:
            return link.resolve(strict=True)
        except FileNotFoundError as cause:
            raise OperationError(
                ErrorCode.SWITCH_FAILED,
                f"cannot switch the extensions: {link} names no runtime",
                "Provision the board: avocadoctl provision",
            ) from cause

    def _place(self, kind: Kind, runtime: Path, active: Path, deadline: float) -> None:
        if runtime.resolve() == active:
            return
        target = active / kind
        # Older runtimes may lack the folder of a kind they did not use.
        target.mkdir(exist_ok=True)
        self._units.bind_read_only(str(runtime / kind), mount_unit(target), _left(deadline))

    def _take_mounts_away(self, kind: Kind, deadline: float) -> None:
        anywhere = mount_unit(self._state.resolve() / "runtimes").removesuffix(".mount")
        # The pattern is matched as fnmatch does: the backslashes of escaped characters are literal only when doubled.
        pattern = anywhere.replace("\\", "\\\\") + f"-*-{kind}.mount"
        for unit in self._units.loaded_like(pattern):
            self._units.stop(unit, _left(deadline))

    def _reload(self, kind: Kind, timeout_s: float) -> None:
        service = _SERVICES[kind]
        try:
            self._units.reload_or_restart(service, timeout_s)
        except OperationError as cause:
            if cause.code is not ErrorCode.UNIT_FAILED:
                raise
            raise OperationError(
                ErrorCode.SWITCH_FAILED,
                f"cannot merge the {kind} set: {service} failed, and one unreadable image fails them all",
                f"See which: journalctl -b -n 20 -u {service}",
            ) from cause

    def _check(self, runtime: Path | None) -> None:
        self._known = None
        found = self.merged()
        for kind in Kind:
            wanted = () if runtime is None else link_names(runtime / kind)
            if found.names[kind] != wanted:
                missing = sorted(set(wanted) - set(found.names[kind]))
                surplus = sorted(set(found.names[kind]) - set(wanted))
                raise OperationError(
                    ErrorCode.SWITCH_FAILED,
                    f"cannot merge the {kind} set: missing {', '.join(missing) or 'nothing'}, "
                    f"not wanted {', '.join(surplus) or 'nothing'}",
                    f"See which image systemd ignored: journalctl -b -n 20 -u {_SERVICES[kind]}",
                    {"missing": missing, "surplus": surplus},
                )


def link_names(folder: Path) -> tuple[str, ...]:
    """The link names without `.raw` in a runtime's folder of one kind, lowest first."""
    if not folder.is_dir():
        return ()
    return tuple(sorted(path.name.removesuffix(".raw") for path in folder.iterdir() if path.name.endswith(".raw")))


def mount_unit(where: Path) -> str:
    """The name of the mount unit of a path, escaped as systemd-escape --path does."""
    text = str(where).strip("/")
    return "".join(_escaped(character, first=index == 0) for index, character in enumerate(text)) + ".mount"


def _escaped(character: str, *, first: bool) -> str:
    if character == "/":
        return "-"
    if character in _UNIT_NAME_CHARACTERS and not (first and character == "."):
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode())


def _marks() -> object:
    """Differs after every merge and unmerge: each overlay is a file system of its own, with a marker file made anew."""
    marks: list[tuple[int, ...]] = []
    for path in _MARKERS:
        try:
            found = path.stat()
        except FileNotFoundError:
            marks.append(())
        else:
            marks.append((found.st_dev, found.st_ino, found.st_mtime_ns))
    return tuple(marks)


def _read_status(kind: Kind) -> tuple[tuple[str, ...], str]:
    tool = _TOOLS[kind]
    finished = run_checked([tool, "status", "--json=short"], _STATUS_TIMEOUT_S, failure=ErrorCode.SWITCH_FAILED)
    try:
        rows = json.loads(finished.stdout)
        return parse_status(rows)
    except (ValueError, KeyError, TypeError) as cause:
        raise OperationError(ErrorCode.SWITCH_FAILED, f"cannot read what {tool} status says") from cause


def parse_status(rows: list[dict[str, Any]]) -> tuple[tuple[str, ...], str]:
    """Merged names, lowest first, and since when, from the rows of `status --json=short`; one row a hierarchy."""
    names: set[str] = set()
    since = ""
    for row in rows:
        extensions = row["extensions"]
        if isinstance(extensions, list):
            names.update(extensions)
            if isinstance(row.get("since"), int):
                since = datetime.fromtimestamp(row["since"] / 1_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return tuple(sorted(names)), since


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise OperationError(ErrorCode.STEP_TIMEOUT, "cannot switch the extensions: the time for it is used up")
    return left

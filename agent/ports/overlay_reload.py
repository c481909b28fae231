"""The Overlay port through systemd's own services: a bind mount over the active links, then a reload.

For a trial the new runtime's link folder is bind-mounted, by PID 1, over the folder `active` names; systemd then merges
what it finds there. The mount is gone after a reboot, and so the trial with it. There is a gap of some milliseconds in
every reload, so this is for boards where the gapless adapter cannot work. A job that is `done` can still mean that
nothing was merged (an image that does not match this OS is ignored), so the result is read afterwards.
"""

from __future__ import annotations

import time
from pathlib import Path

from agent.contract.disk import disk_errors
from agent.contract.errors import ErrorCode, OperationError
from agent.ports.overlay_merged import MergedReader, linked_images, of_extensions
from agent.ports.protocols import Kind, MergedSet
from agent.ports.systemd import SystemdUnits

_SERVICES = {Kind.SYSEXT: "systemd-sysext.service", Kind.CONFEXT: "systemd-confext.service"}
_UNIT_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:_.")


class ReloadOverlay:
    """The Overlay port on systemd-sysext.service and systemd-confext.service."""

    def __init__(self, units: SystemdUnits, state: Path) -> None:
        self._units = units
        self._state = state
        self._reader = MergedReader(state)

    def merged(self) -> MergedSet:
        """What systemd itself says is merged, but for the board's own module index."""
        return of_extensions(self._reader.read())

    def check(self, runtime: Path, timeout_s: float) -> None:
        """Nothing: systemd looks at the images when it merges them."""

    def show(self, runtime: Path | None, timeout_s: float) -> None:
        """The running overlay is exactly this runtime folder's set (None: nothing merged); a reboot forgets it."""
        deadline = time.monotonic() + timeout_s
        take_trial_mounts_away(self._units, self._state, deadline)
        if runtime is None:
            for kind in Kind:
                self._units.stop(_SERVICES[kind], left(deadline))
        else:
            active = self._active_folder()
            for kind in Kind:
                self._place(kind, runtime, active, deadline)
            before = self.merged()
            for kind in Kind:
                # Reloading an empty set is a pointless gap in /etc.
                if link_names(runtime / kind) or before.names[kind]:
                    self._reload(kind, left(deadline))
        self._reader.require({kind: link_names(runtime / kind) if runtime else () for kind in Kind})

    def settle(self, timeout_s: float) -> None:
        """The trial's bind mounts are gone; `active` names the same set, so nothing visible changes."""
        take_trial_mounts_away(self._units, self._state, time.monotonic() + timeout_s)

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
        # Whatever else lies there would be merged with it. What lies in the active folder already is, and stays.
        if strays := sorted(set(link_names(runtime / kind)) - set(linked_images(runtime / kind))):
            raise OperationError(
                ErrorCode.SWITCH_FAILED,
                f"cannot switch the extensions: {runtime / kind / strays[0]}.raw is no link to an image of ours",
                f"Move {runtime / kind / strays[0]}.raw elsewhere.",
            )
        target = active / kind
        # Older runtimes may lack the folder of a kind they did not use.
        with disk_errors(target):
            target.mkdir(exist_ok=True)
        self._units.bind_read_only(str(runtime / kind), mount_unit(target), left(deadline))

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


def take_trial_mounts_away(units: SystemdUnits, state: Path, deadline: float) -> bool:
    """No link folder is covered by another runtime's; whether one was."""
    found = False
    anywhere = mount_unit(state.resolve() / "runtimes").removesuffix(".mount")
    # The pattern is matched as fnmatch does: the backslashes of escaped characters are literal only when doubled.
    for kind in Kind:
        for unit in units.loaded_like(anywhere.replace("\\", "\\\\") + f"-*-{kind}.mount"):
            units.stop(unit, left(deadline))
            found = True
    return found


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


def left(deadline: float) -> float:
    """Seconds until the deadline. Raises `step-timeout` when there are none."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise OperationError(ErrorCode.STEP_TIMEOUT, "cannot switch the extensions: the time for it is used up")
    return seconds

"""The Overlay port without a gap: no file of any extension is missing for an instant while the set is switched.

A child process (overlay_child.py) builds the new overlays beside the running ones and slides them in. Nothing is left
that a reboot would have to undo: a trial is a mount. A kind whose images are already the right ones is not touched, so
that a new model never remounts /etc. Boards whose kernel or whose overlays do not allow it get systemd's own reload
(overlay_reload.py); which one it is, is decided once at start by trying (`choose_overlay`). What takes long, hashing
images and starting the child, is done before services stop (`check`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent.contract import errors, release
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import IMAGE_NAMESPACE
from agent.ports import child, hierarchies, image_child, mounts, overlay_child
from agent.ports.overlay_merged import MergedReader, linked_images, of_extensions
from agent.ports.overlay_reload import ReloadOverlay, left, take_trial_mounts_away
from agent.ports.process import Started, checked
from agent.ports.protocols import Kind, MergedSet, Overlay, Switching
from agent.ports.systemd import SystemdUnits

_PROBE_TIMEOUT_S = 15.0
_READ_BYTES_PER_S = 10_000_000  # of a slow card, hashed
_LOG = logging.getLogger("avocado.overlay")


class GaplessOverlay:
    """The Overlay port on the kernel's mount API."""

    def __init__(self, units: SystemdUnits, state: Path, os_release: Mapping[str, str], arch: str) -> None:
        self._units = units
        self._state = state
        self._board = {"os_release": dict(os_release), "arch": arch, "namespace": str(IMAGE_NAMESPACE)}
        self._reader = MergedReader(state)
        self._command = child.command(errors, release, mounts, image_child, hierarchies, overlay_child)
        self._marks: dict[str, list[int]] = {}  # how an image lay on the disk when its bytes were right
        self._ready: Started | None = None

    def merged(self) -> MergedSet:
        """What systemd itself says is merged, but for the board's own module index."""
        return of_extensions(self._reader.read())

    def check(self, runtime: Path, timeout_s: float) -> None:
        """Every image of the runtime could be shown. Its bytes are hashed now, and the next child is started."""
        request = self.request_for(runtime)
        answer = self._ask({"do": "check", **request}, timeout_s + self._reading_s(request["sets"]))
        self._marks |= answer["marks"]
        if self._ready is None or not self._ready.is_waiting:
            self._ready = Started(self._command)

    def request_for(self, runtime: Path) -> dict[str, Any]:
        """What a child has to know to show or check the runtime folder's set, whatever is shown now."""
        sets = {kind.value: self._images(linked_images(runtime / kind)) for kind in Kind}
        return {"sets": sets, **self._board}

    def show(self, runtime: Path | None, timeout_s: float) -> None:
        """The running overlay is exactly this runtime folder's set (None: nothing merged); a reboot forgets it."""
        deadline = time.monotonic() + timeout_s
        # An agent that switched by reload may have been interrupted: nobody knows what it merged.
        unknown = take_trial_mounts_away(self._units, self._state, deadline)
        wanted = {kind: linked_images(runtime / kind) if runtime else {} for kind in Kind}
        merged, stacks = self._reader.read(), _stacked()
        sets = {
            kind.value: self._images(images)
            for kind, images in wanted.items()
            if unknown or kind in stacks or merged.images.get(kind) != images
        }
        if sets:
            ready, self._ready = self._ready, None
            allowed_s = left(deadline) + self._reading_s(sets)
            self._ask({"do": "switch", "sets": sets, **self._board}, allowed_s, ready)
        self._reader.require({kind: tuple(images) for kind, images in wanted.items()}, map(Kind, sets))

    def settle(self, timeout_s: float) -> None:
        """No scaffolding of either adapter is left; where a switch was cut short, `active` is what is shown."""
        deadline = time.monotonic() + timeout_s
        take_trial_mounts_away(self._units, self._state, deadline)
        if self._ready is not None:
            self._ready.end()
            self._ready = None
        if stacks := _stacked():
            _LOG.warning("a switch of the extensions was cut short: %s", ", ".join(sorted(stacks)))
            active = self._state / "active"
            self.show(active.resolve() if active.exists() else None, left(deadline))

    def unable(self) -> str:
        """Why this board cannot be switched without a gap, or an empty string."""
        try:
            return str(self._ask({"do": "probe"}, _PROBE_TIMEOUT_S)["unable"])
        except OperationError as error:
            return error.message

    def _images(self, images: Mapping[str, str]) -> list[dict[str, Any]]:
        # The boot merges what `active` lists without asking; refusing it here would only make a way back impossible.
        trusted = {image for kind in Kind for image in linked_images(self._state / "active" / kind).values()}
        return [
            {
                "link": link,
                "image_id": image,
                "path": str(self._state / "images" / f"{image}.raw"),
                "trusted": image in trusted,
                "mark": self._marks.get(image),
            }
            for link, image in images.items()
        ]

    def _reading_s(self, sets: Mapping[str, list[dict[str, Any]]]) -> float:
        """How long the bytes may take that are hashed for the first time."""
        paths = [Path(i["path"]) for images in sets.values() for i in images if not i["trusted"] and i["mark"] is None]
        return sum(path.stat().st_size for path in paths if path.is_file()) / _READ_BYTES_PER_S

    def _ask(self, request: Mapping[str, Any], timeout_s: float, ready: Started | None = None) -> dict[str, Any]:
        program = ready if ready is not None and ready.is_waiting else Started(self._command)
        finished = checked(program.finish(timeout_s, stdin=json.dumps(request).encode()), ErrorCode.SWITCH_FAILED)
        answer: dict[str, Any] = json.loads(finished.stdout)
        if "error" in answer:
            raise OperationError.from_dict(answer["error"])
        return answer


def _stacked() -> set[Kind]:
    """Kinds of which one hierarchy has a second overlay below the visible one."""
    found = mounts.mounted("1")
    return {
        kind
        for kind, layout in hierarchies.LAYOUTS.items()
        if any(mounts.stacked(found, str(Path(where).resolve()), kind.value) > 1 for where in layout.hierarchies)
    }


def choose_overlay(
    units: SystemdUnits, state: Path, os_release: Mapping[str, str], arch: str, *, wanted: str = "auto"
) -> tuple[Overlay, Switching]:
    """The adapter for this board. `wanted`: `auto` tries, `reload` is systemd's own way."""
    gapless = GaplessOverlay(units, state, os_release, arch)
    reason = "the configuration says so" if wanted == "reload" else gapless.unable()
    if reason:
        return ReloadOverlay(units, state), Switching("reload", reason)
    return gapless, Switching("gapless", "")

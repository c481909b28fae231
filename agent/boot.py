"""The other half of the merge at boot: what systemd-sysext does not do.

systemd has merged the images and reloaded itself before the agent starts. Once per boot the agent loads the modules the
extensions ask for, runs their commands, starts the services they own, and then reads every merged image whole, since
systemd merges damaged data without a word. A runtime that provision wrote has no module index yet, and gets it before
the first module is asked for; one that is damaged is made anew. What fails is a problem in the status and never keeps
the rest from running.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from agent.contract.disk import disk_errors
from agent.contract.errors import OperationError
from agent.contract.local import signed
from agent.contract.manifest import Extension, Manifest
from agent.extensions import Problem, commands, modules
from agent.observe import Disk, owned_by
from agent.order import in_start_order
from agent.plan import AGENT_UNIT, INFERENCE_UNIT
from agent.ports.protocols import Kind, ModuleIndexer, Overlay, Store, Units

_LOG = logging.getLogger("avocado.boot")
_ON_MERGE = "AVOCADO_ON_MERGE"
SWITCH_TIMEOUT_S = 30.0


class BootHalf:
    """Runs once per boot; `marker` lies on a file system that a boot empties, and keeps what was found."""

    def __init__(self, disk: Disk, overlay: Overlay, units: Units, indexer: ModuleIndexer, marker: Path) -> None:
        self._disk = disk
        self._indexer = indexer
        self._overlay = overlay
        self._units = units
        self._marker = marker

    def run(self, *, start_timeout_s: float, command_timeout_s: float) -> list[Problem]:
        """Do it unless it was done in this boot, and give the problems found then or now."""
        done = self._done()
        if done is not None:
            return done
        extensions = self._merged()
        releases, unreadable = self._disk.releases(extensions)
        problems = [Problem(error.code.value, error.message, error.remedy) for error in unreadable]
        keys = [release for extension in extensions for release in releases.get(extension.image_id, {}).values()]
        problems += self._mend_index()
        if any(modules(release) for release in keys):
            problems += _attempt(self._index_modules)
        for argv in (
            *(["modprobe", "--", name] for release in keys for name in modules(release)),
            *(argv for release in keys for argv in commands(release, _ON_MERGE)),
        ):
            problems += _attempt(partial(self._units.run, argv, command_timeout_s))
        for name in self._in_start_order(self._to_start(owned_by(extensions, releases))):
            problems += _attempt(partial(self._units.start, name, start_timeout_s))
        problems += damaged(self._disk.store, extensions)
        return problems + _attempt(partial(self._remember, problems))

    def _remember(self, problems: list[Problem]) -> None:
        with disk_errors(self._marker):
            self._marker.write_text(json.dumps([asdict(problem) for problem in problems]), encoding="utf-8")

    def _index_modules(self) -> None:
        runtimes = self._disk.runtimes
        active = runtimes.active()
        if active is None or runtimes.module_index(active) is not None:
            return
        self._show_with_index(runtimes.manifest(active))

    def _show_with_index(self, manifest: Manifest) -> None:
        index = self._indexer.index(manifest.extensions)
        if index is not None:
            self._overlay.show(self._disk.runtimes.stage(manifest, index), SWITCH_TIMEOUT_S)

    def _mend_index(self) -> list[Problem]:
        """An index that is damaged is made anew before modprobe believes it: it lies over the modules of all."""
        runtimes = self._disk.runtimes
        active = runtimes.active()
        index = runtimes.module_index(active) if active is not None else None
        if active is None or index is None or self._disk.store.verify_made(index):
            return []
        manifest = runtimes.manifest(active)
        # Without it first: what is merged stays the damaged file, whatever then lies under the same name.
        failed = _attempt(lambda: self._overlay.show(runtimes.stage(manifest), SWITCH_TIMEOUT_S))
        failed += _attempt(partial(self._show_with_index, manifest))
        return [
            Problem(
                "module-index-damaged",
                "the index of kernel modules that this board made no longer had the bytes of its name"
                + ("" if failed else "; it was made anew"),
                "Check the disk (journalctl -k -b -p warning), then reboot: the agent makes it anew at its start."
                if failed
                else "If it happens again, replace the disk.",
            ),
            *failed,
        ]

    def _to_start(self, owned: list[str]) -> list[str]:
        """Not what somebody masked, nor what is missing where its extension is disabled."""
        names = [unit for unit in owned if unit != AGENT_UNIT]
        try:
            states = self._units.states(names)
        except OperationError as error:
            _LOG.warning("%s", error.message)
            return names
        active = self._disk.runtimes.active()
        left_out = signed(self._disk.runtimes.manifest(active))[1] if active is not None else ()
        unwanted = ("masked", "not-found") if left_out else ("masked",)
        return [name for name in names if states[name].load not in unwanted]

    def _in_start_order(self, names: list[str]) -> list[str]:
        try:
            return in_start_order(names, self._units.relations(names), first=INFERENCE_UNIT)
        except OperationError as error:
            _LOG.warning("%s", error.message)
            return names

    def _done(self) -> list[Problem] | None:
        try:
            return [Problem(**entry) for entry in json.loads(self._marker.read_text(encoding="utf-8"))]
        except FileNotFoundError:
            return None
        except (ValueError, TypeError):  # cut off while it was written: everything here may be done twice
            return None

    def _merged(self) -> list[Extension]:
        active = self._disk.runtimes.active()
        if active is None:
            return []
        manifest = self._disk.runtimes.manifest(active)
        names = {(kind, name) for kind, names in self._overlay.merged().names.items() for name in names}
        return [
            extension
            for extension in manifest.extensions
            if any(
                (Kind(kind), manifest.link_name(extension).removesuffix(".raw")) in names for kind in extension.types
            )
        ]


def _attempt(work: Callable[[], None]) -> list[Problem]:
    try:
        work()
    except OperationError as error:
        _LOG.warning("%s", error.message)
        return [Problem(error.code.value, error.message, error.remedy)]
    return []


def damaged(store: Store, extensions: Iterable[Extension]) -> list[Problem]:
    """A problem for each image whose bytes are no longer those that were signed."""
    return [
        Problem(
            "image-damaged",
            f"extension {extension.name} {extension.version}: its image no longer has the bytes that were signed",
            "Deploy this runtime again from the host, then reboot; if it happens again, replace the disk.",
        )
        for extension in extensions
        if not store.verify_image(extension)
    ]

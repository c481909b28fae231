"""The other half of the merge at boot: what systemd-sysext does not do.

systemd has merged the images and reloaded itself before the agent starts. Once per boot the agent loads the modules the
extensions ask for, runs their commands, starts the services they own, and then reads every merged image whole, since
systemd merges damaged data without a word. A runtime that provision wrote has no module index yet, and gets it before
the first module is asked for; one that is damaged is made anew. Where the active runtime's manifest is damaged, its
links say what is merged, and all this is done from them. What fails is a problem in the status and never keeps the rest
from running.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from agent.contract.disk import disk_errors
from agent.contract.errors import OperationError
from agent.contract.local import is_partial
from agent.contract.manifest import Extension, Manifest
from agent.damage import DamagedImages
from agent.extensions import Problem, commands, modules
from agent.observe import Disk, owned_by
from agent.order import in_start_order
from agent.plan import AGENT_UNIT, INFERENCE_UNIT
from agent.ports.protocols import Kind, ModuleIndexer, Overlay, Units

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
        self._damaged = DamagedImages(disk.store)

    def run(self, *, start_timeout_s: float, command_timeout_s: float) -> list[Problem]:
        """Do it unless it was done in this boot, and give the problems found then or now."""
        done = self._done()
        if done is not None:
            return done
        manifest = self._disk.active_manifest()
        index_problems = (
            self._mend_index(manifest) if any(Kind.SYSEXT in e.types for e in self._merged(manifest)) else []
        )
        extensions = self._merged(manifest)
        releases, unreadable = self._disk.releases(extensions)
        problems = [Problem(error.code.value, error.message, error.remedy) for error in unreadable]
        keys = [release for extension in extensions for release in releases.get(extension.image_id, {}).values()]
        problems += index_problems
        if manifest is not None and any(modules(release) for release in keys):
            problems += _attempt(partial(self._index_modules, manifest))
        for argv in (
            *(["modprobe", "--", name] for release in keys for name in modules(release)),
            *(argv for release in keys for argv in commands(release, _ON_MERGE)),
        ):
            problems += _attempt(partial(self._units.run, argv, command_timeout_s))
        unwanted = self._unwanted(manifest)
        for name in self._in_start_order(self._to_start(owned_by(extensions, releases), unwanted)):
            problems += _attempt(partial(self._units.start, name, start_timeout_s))
        self._damaged.look(extensions)
        return problems + _attempt(partial(self._remember, problems))

    def damaged(self) -> list[Problem]:
        """A problem for each image that was found damaged at this boot, is merged still, mended on the disk or not."""
        try:
            return self._damaged.problems(self._overlay.merged())
        except OperationError:  # nobody can tell what is merged, which is a problem of its own
            return []

    def _remember(self, problems: list[Problem]) -> None:
        found = [*map(asdict, problems), *({"damaged": e.model_dump(mode="json")} for e in self._damaged.extensions)]
        with disk_errors(self._marker):
            self._marker.write_text(json.dumps(found), encoding="utf-8")

    def _index_modules(self, manifest: Manifest) -> None:
        if self._disk.runtimes.module_index(manifest.id) is None:
            self._show_with_index(manifest)

    def _show_with_index(self, manifest: Manifest) -> None:
        index = self._indexer.index(manifest.extensions)
        if index is not None:
            self._overlay.show(self._disk.runtimes.point_index(manifest.id, index), SWITCH_TIMEOUT_S)

    def _mend_index(self, manifest: Manifest | None) -> list[Problem]:
        """An index that is damaged is made anew before modprobe believes it: it lies over the modules of all."""
        runtimes = self._disk.runtimes
        index = runtimes.module_index(manifest.id) if manifest is not None else None
        if manifest is None or index is None or self._disk.store.verify_made(index):
            return []
        # Without it first: what is merged stays the damaged file, whatever then lies under the same name.
        failed = _attempt(lambda: self._overlay.show(runtimes.point_index(manifest.id, None), SWITCH_TIMEOUT_S))
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

    def _unwanted(self, manifest: Manifest | None) -> tuple[str, ...]:
        """As what a unit is not started: somebody masked it, or it is missing where its extension is disabled."""
        return ("masked", "not-found") if manifest is not None and is_partial(manifest) else ("masked",)

    def _to_start(self, owned: list[str], unwanted: tuple[str, ...]) -> list[str]:
        names = [unit for unit in owned if unit != AGENT_UNIT]
        try:
            states = self._units.states(names)
        except OperationError as error:
            _LOG.warning("%s", error.message)
            return names
        return [name for name in names if states[name].load not in unwanted]

    def _in_start_order(self, names: list[str]) -> list[str]:
        try:
            return in_start_order(names, self._units.relations(names), first=INFERENCE_UNIT)
        except OperationError as error:
            _LOG.warning("%s", error.message)
            return names

    def _done(self) -> list[Problem] | None:
        try:
            found = json.loads(self._marker.read_text(encoding="utf-8"))
            problems = [Problem(**entry) for entry in found if "damaged" not in entry]
            self._damaged.extensions = [
                Extension.model_construct(**entry["damaged"]) for entry in found if "damaged" in entry
            ]
        except (OSError, ValueError, TypeError):  # not written, or cut off: everything here may be done twice
            return None
        return problems

    def _merged(self, manifest: Manifest | None) -> list[Extension]:
        if manifest is None:
            return []
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

"""The board as it is: what is on disk, what systemd merged, what runs, put together from the ports.

Two readers: the plan, which needs an Observed before a change, and people, who get the status document. Neither trusts
a record where the device can be asked. What an image says about itself never changes, since its name is its hash, so
it is read once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from agent.change.record import ChangeRecord, Outcome
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.local import is_partial, signed
from agent.contract.manifest import Extension, Manifest
from agent.contract.status import (
    SCHEMA,
    ExtensionEntry,
    ProblemEntry,
    RuntimeEntry,
    ServiceEntry,
    StatusDocument,
    agent_entry,
    change_entry,
)
from agent.extensions import ExtensionView, Problem, compare, owned_services
from agent.itself import agent_problems, newer_agent
from agent.plan import NpuFacts, Observed
from agent.ports.protocols import (
    ImageReader,
    Inference,
    InferenceState,
    Kind,
    MergedSet,
    Overlay,
    Runtimes,
    Store,
    Switching,
    Units,
    UnitState,
)
from agent.problems import change_problems, inference_problems, service_problems
from agent.staged import active_manifest, linked_active, read_manifests

_DESCRIBE_TIMEOUT_S = 2.0
_NOTHING = MergedSet({})
_LOG = logging.getLogger("avocado.observe")
_Answer = TypeVar("_Answer")
_Other = TypeVar("_Other")

Releases = dict[str, Mapping[Kind, Mapping[str, str]]]


@dataclass(frozen=True, slots=True)
class Identity:
    """What this board is; none of it changes while the agent runs."""

    target: str
    arch: str
    python: str
    agent_version: str
    os_release: Mapping[str, str]
    switching: Switching | None = None
    agent_image: str | None = None  # what it was started from; None: the base, or nobody can tell


def identify(board: Mapping[str, Any], agent_version: str) -> Identity:
    """The board's identity: `board` is what provision wrote, the rest is asked of the system."""
    return Identity(
        target=str(board.get("target", "")),
        arch=str(board.get("arch", "") or platform.machine()),
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        agent_version=agent_version,
        os_release=platform.freedesktop_os_release(),
    )


def read_board(state: Path) -> dict[str, Any]:
    """What provision wrote of the board. Raises `bad-config`."""
    path = state / "board.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}  # not provisioned: every deploy is then refused as one for another board
    except (OSError, ValueError) as cause:
        raise OperationError(
            ErrorCode.BAD_CONFIG, f"cannot read {path}: {cause}", "Provision the board again."
        ) from cause
    return document if isinstance(document, dict) else {}


class History(Protocol):
    """The journal, as far as an observer reads it."""

    def changes(self) -> Iterator[ChangeRecord]:
        """Every record that is more than a plan, newest first, read as they are asked for."""


class StrayFinder(Protocol):
    """Looks for what nobody deployed."""

    def find(self, manifests: Mapping[str, Manifest]) -> list[Problem]:
        """A problem for each, with what to type."""


class Disk:
    """The store and the runtimes, and what the images in them say about themselves."""

    def __init__(
        self, store: Store, runtimes: Runtimes, images: ImageReader, strays: StrayFinder | None = None
    ) -> None:
        self.store = store
        self.runtimes = runtimes
        self._images = images
        self._strays = strays
        self._releases: Releases = {}
        self._unreadable: dict[str, OperationError] = {}
        self._lock = threading.Lock()

    def manifests(self) -> tuple[dict[str, Manifest], list[OperationError]]:
        """Every runtime on disk that can be read, and what could not."""
        return read_manifests(self.runtimes)

    def active_manifest(self) -> Manifest | None:
        """The active runtime, as its links tell it where its manifest is damaged; None where none is active."""
        return active_manifest(self.runtimes)

    def strays(self, manifests: Mapping[str, Manifest]) -> list[Problem]:
        """What lies among all this that nobody deployed."""
        try:
            return [] if self._strays is None else self._strays.find(manifests)
        except OSError as cause:
            said = f"cannot look through {cause.filename}: {cause.strerror or cause}"
            return [Problem(ErrorCode.DISK_FAILED.value, said, "Check the disk: journalctl -k -b -p warning")]

    def image_sizes(self) -> dict[str, int]:
        """Every complete image and its size in bytes."""
        found: dict[str, int] = {}
        for image_id in self.store.image_ids():
            path = self.store.image(image_id)
            with contextlib.suppress(OSError):  # gone meanwhile, or it cannot be read: it is not there
                found |= {image_id: path.stat().st_size} if path is not None else {}
        return found

    def good_images(self, extensions: Iterable[Extension]) -> dict[str, int]:
        """Of these, the images that still have the bytes that were signed, and their sizes. Reads them all."""
        return {e.image_id: e.size_bytes for e in extensions if self.store.verify_image(e)}

    def releases(self, extensions: Iterable[Extension]) -> tuple[Releases, list[OperationError]]:
        """The extension-release keys of images that are on the board, and which images could not be read."""
        with self._lock:  # the plan and the status ask from different threads
            wanted = {extension.image_id: extension for extension in extensions}
            for image_id, extension in wanted.items():
                if image_id not in self._releases and image_id not in self._unreadable:
                    self._read(extension)
            found = {image_id: self._releases[image_id] for image_id in wanted if image_id in self._releases}
            return found, [error for image_id, error in self._unreadable.items() if image_id in wanted]

    def _read(self, extension: Extension) -> None:
        path = self.store.image(extension.image_id)
        if path is None:  # it may come; not remembered
            return
        try:
            kinds = [Kind(kind) for kind in extension.types]
            keys = {kind: self._images.release(path, extension.name, kind) for kind in kinds}
        except OperationError as error:
            self._unreadable[extension.image_id] = error
        else:
            self._releases[extension.image_id] = keys


class Observer:
    """Asks the ports and puts the answers together."""

    def __init__(self, identity: Identity, disk: Disk, overlay: Overlay, units: Units, inference: Inference) -> None:
        self.identity = identity
        self.disk = disk
        self._overlay = overlay
        self._units = units
        self._inference = inference

    def observe(self, journal: History) -> Observed:
        """The board before a change."""
        identity = self.identity
        manifests, _ = self.disk.manifests()
        runtimes = self.disk.runtimes
        active = runtimes.active()
        if (linked := linked_active(runtimes, manifests)) is not None:
            manifests[linked.id] = linked.on_board(identity.target, identity.arch)
        merged = self._overlay.merged()
        releases, _ = self.disk.releases(e for m in manifests.values() for e in m.extensions)
        newest = next(journal.changes(), None)
        inference, silent = self._ask_inference()
        return Observed(
            target=identity.target,
            arch=identity.arch,
            python=identity.python,
            agent_version=identity.agent_version,
            os_release=identity.os_release,
            active=active,
            previous=runtimes.previous(),
            runtimes=manifests,
            images=self.disk.image_sizes(),
            releases=releases,
            merged=merged,
            free_bytes=self.disk.store.free_bytes(),
            parts=self.disk.store.begun(),
            inference=inference,
            silent=silent,
            last_npu=last_npu(journal.changes()),
            after_stuck=newest is not None and newest.outcome is Outcome.STUCK,
            newer_agent=newer_agent(self.identity.agent_image, merged, manifests.values()),
        )

    def _ask_inference(self) -> tuple[InferenceState | None, bool]:
        try:
            return self._inference.describe(_DESCRIBE_TIMEOUT_S), False
        except OperationError as error:
            # A service that hangs is what a rollback is asked for.
            _LOG.info("%s", error.message)
            return None, True

    def document(
        self,
        record: ChangeRecord | None,
        inference: Mapping[str, Any] | None,
        extra_problems: Iterable[Problem],
        *,
        busy: bool,
        interval_s: float,
        now: str,
    ) -> StatusDocument:
        """The status document. `inference` is what the pose service says of itself; `busy`: services may be down."""
        manifests, errors = self.disk.manifests()
        runtimes = self.disk.runtimes
        active, previous = runtimes.active(), runtimes.previous()
        signed_one = manifests.get(active or "")
        wanted = signed_one or linked_active(runtimes, manifests)
        trial = manifests.get(record.to_runtime or "") if record and record.outcome is Outcome.RUNNING else None
        # What cannot be asked is one more problem in the document, never the end of it.
        merged = _kept(self._overlay.merged, None, errors)
        listed = [*manifests.values(), *([wanted] if wanted and wanted is not signed_one else [])]
        releases, bad_images = self.disk.releases(e for m in listed for e in m.extensions)
        report = compare(
            trial if trial is not None and merged is not None and merged.is_exactly(trial) else wanted,
            merged,
            held=self.disk.store.image_ids(),
            releases=releases,
            others=[m for runtime, m in manifests.items() if runtime != active],
        )
        owned = list(dict.fromkeys(unit for view in report.extensions if view.wanted for unit in view.services))
        none: dict[str, UnitState] = {}
        services = _kept(partial(self._units.states, owned), none, errors)
        problems = [
            *(_problem_of(error) for error in (*errors, *bad_images)),
            *(_entry_of(problem) for problem in report.problems),
            *(_entry_of(problem) for problem in self.disk.strays(manifests)),
            *(_entry_of(problem) for problem in extra_problems),
            *change_problems(record),
            *(() if busy else agent_problems(newer_agent(self.identity.agent_image, merged or _NOTHING, listed))),
            *(() if busy else service_problems(services, partial=wanted is not None and is_partial(wanted))),
            *(() if busy or inference is None else inference_problems(inference)),
        ]
        document: StatusDocument = {
            "schema": SCHEMA,
            "target": self.identity.target,
            "arch": self.identity.arch,
            "agent": agent_entry(self.identity.agent_version, interval_s, now),
            "runtime": _runtime_entry(signed_one),
            "previous": _runtime_entry(manifests.get(previous or "")),
            "runtimes": [_present(m) for m in sorted(manifests.values(), key=lambda m: m.built_at, reverse=True)],
            "extensions": [_extension_entry(view, known=merged is not None) for view in report.extensions],
            "services": [_service_entry(state) for state in services.values()],
            "inference": dict(inference) if inference is not None else None,
            "change": change_entry(record.as_dict()) if record is not None else None,
            "problems": [problem for at, problem in enumerate(problems) if problem not in problems[:at]],
        }
        if (switching := self.identity.switching) is not None:
            document["switching"] = {"way": switching.way, "reason": switching.reason}
        return document


def _kept(ask: Callable[[], _Answer], otherwise: _Other, errors: list[OperationError]) -> _Answer | _Other:
    try:
        return ask()
    except OperationError as error:
        errors.append(error)
        return otherwise


def owned_by(extensions: Iterable[Extension], releases: Mapping[str, Mapping[Kind, Mapping[str, str]]]) -> list[str]:
    """The units that these extensions own, in merge order."""
    units: dict[str, None] = {}
    for extension in extensions:
        for keys in releases.get(extension.image_id, {}).values():
            units.update(dict.fromkeys(owned_services(keys)))
    return list(units)


def last_npu(records: Iterable[ChangeRecord]) -> NpuFacts | None:
    """The accelerator as the newest record that mentions one describes it."""
    for record in records:
        npu = record.facts.get("npu")
        if isinstance(npu, dict):
            return NpuFacts(tuple(npu["nodes"]), float(npu["settle_s"]), int(npu["contexts"]))
    return None


def _present(manifest: Manifest) -> RuntimeEntry:
    return {
        "name": manifest.runtime.name,
        "version": manifest.runtime.version,
        "id": manifest.id,
        "built_at": manifest.built_at,
        "manifest_version": manifest.manifest_version,
        "disabled": list(signed(manifest)[1]),
    }


def _runtime_entry(manifest: Manifest | None) -> RuntimeEntry | None:
    return None if manifest is None else _present(manifest)


def _extension_entry(view: ExtensionView, *, known: bool) -> ExtensionEntry:
    entry: ExtensionEntry = {
        "name": view.name,
        "version": view.version,
        "isSysext": Kind.SYSEXT in view.types,
        "isConfext": Kind.CONFEXT in view.types,
        "isMerged": view.is_merged,
        "origin": view.origin,
        "imageId": view.image_id,
        "shortId": view.image_id[:8],
        "sha256": view.sha256,
        "merge_name": view.merge_name,
        "services": list(view.services),
        "isDisabled": view.disabled,
    }
    return entry if known else {**entry, "isUnknown": True}


def _service_entry(state: UnitState) -> ServiceEntry:
    return {
        "name": state.name,
        "load": state.load,
        "active": state.active,
        "sub": state.sub,
        "result": state.result,
        "restarts": state.restarts,
    }


def _problem_of(error: OperationError) -> ProblemEntry:
    return {"code": error.code.value, "message": error.message, "remedy": error.remedy}


def _entry_of(problem: Problem) -> ProblemEntry:
    return {"code": problem.code, "message": problem.message, "remedy": problem.remedy}

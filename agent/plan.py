"""The plan: what is observed and what is wanted become an ordered list of steps, or one clear refusal.

Pure. Every condition that can be known before anything is touched is checked here: target board, architecture,
interpreter, agent, operating system, extension compatibility as far as the images are on the board, free space. A
step is a kind and plain JSON inputs, so the journal can rebuild the list after a restart; printing the list is the
documentation of an update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.linked import LinkedRuntime
from agent.contract.local import is_partial, signed
from agent.contract.manifest import Extension, Manifest
from agent.extensions import Kind, MergedSet, merge_names, owned_services
from agent.fitness import check_board
from agent.health import InferenceState
from agent.over_etc import changes_etc, within_s


class ChangeKind(StrEnum):
    """What was asked for. Refresh, merge and unmerge move only the running overlay; the others the boot set too."""

    DEPLOY = "deploy"
    ACTIVATE = "activate"
    ROLLBACK = "rollback"
    ENABLE = "enable"
    DISABLE = "disable"
    REFRESH = "refresh"
    MERGE = "merge"
    UNMERGE = "unmerge"


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One step of a change: which handler, and everything it needs as JSON values."""

    kind: str
    inputs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NpuFacts:
    """The accelerator as a service once described it; release_npu falls back on the last change's."""

    nodes: tuple[str, ...]
    settle_s: float
    contexts: int


@dataclass(frozen=True, slots=True)
class Bystanders:
    """What no extension owns and a change must stop all the same, for the images that it takes away.

    `units` map a file of such an image, or go down with a unit that is stopped. `unread`: processes of which nobody
    could tell in time. `jobs` map one too, but a second start would do their work again, so they are left alone.
    """

    units: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Observed:
    """The board before the change, gathered by the daemon from its ports.

    `images` maps every complete image to its size in bytes, `parts` every begun one to the bytes it takes. `releases`
    has the extension-release keys of images on the board, by image id and kind, as far as they could be read.
    `bystanders` belong to the images that `leaving` names. `last_npu` comes from the newest change record whose facts
    have `npu`. `silent`: the pose service is there and says nothing of use, so `inference` is unknown, not absent.
    `after_stuck`: the last change ended stuck, so a stopped service is not a wish. `newer_agent`: the version of an
    agent that is merged and does not run yet.
    """

    target: str
    arch: str  # x86_64 | aarch64
    python: str  # minor version such as "3.13"
    agent_version: str
    os_release: Mapping[str, str]
    active: str | None
    previous: str | None
    runtimes: Mapping[str, Manifest]
    images: Mapping[str, int]
    releases: Mapping[str, Mapping[Kind, Mapping[str, str]]]
    merged: MergedSet
    free_bytes: int
    inference: InferenceState | None = None
    silent: bool = False
    last_npu: NpuFacts | None = None
    parts: Mapping[str, int] = field(default_factory=dict)
    after_stuck: bool = False
    newer_agent: str = ""
    bystanders: Bystanders = field(default_factory=Bystanders)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for. `manifest` is None only for unmerge; merge and refresh take the active runtime's.

    `source` is the deploy source string; `transfers` maps an image id to the bytes its cheapest transfer moves.
    `await_host`: whoever asked did so from afar, and will come back over a new connection; a deploy always is so.
    `warm_up`: another model is tried beside the one that serves, before anything is stopped.
    """

    kind: ChangeKind
    manifest: Manifest | None
    source: str | None = None
    transfers: Mapping[str, int] = field(default_factory=dict)
    await_host: bool = False
    warm_up: bool = False


AGENT_EXTENSION = "avocado-agent"
AGENT_UNIT = "avocadod.service"  # runs the change, so no change stops it
BUS_UNITS = ("dbus.service", "dbus-broker.service")  # and over these it asks for everything
INFERENCE_UNIT = "pose.service"  # answers as org.avocado.Inference1
SPARE_BYTES = 16 * 1024 * 1024  # manifests, records, and room for the journal of the base


def plan_change(observed: Observed, wanted: Wanted) -> list[StepSpec]:
    """The steps that bring the board to what is wanted; empty when it is there already.

    Raises OperationError when something that can be known now rules the change out.
    """
    if wanted.kind is ChangeKind.UNMERGE:
        return _unmerge(observed, wanted)
    manifest = _the_manifest(observed, wanted)
    runtime = manifest.runtime
    check_board(observed, manifest, f"cannot {_VERBS[wanted.kind]} runtime {runtime.name} {runtime.version}")
    shown = shown_runtime(observed)
    if manifest.id == observed.active and wanted.kind is not ChangeKind.REFRESH and _stands(observed, manifest):
        # All that is lost of it is its manifest: that is written again, and nothing is stopped for it.
        return _bring(observed, wanted, manifest) if wanted.kind in _MOVES and _lost_manifest(observed) else []
    steps: list[StepSpec] = []
    if wanted.kind in _MOVES:
        steps += _bring(observed, wanted, manifest)
        steps += _warmed_up(observed, wanted, shown, manifest)
    steps += _switch(observed, shown, manifest, wanted.kind)
    steps += _confirmed(observed, wanted, shown, manifest)
    if manifest.id != observed.active:
        keep = [runtime for runtime in (manifest.id, observed.active) if runtime]
        steps += [
            StepSpec("activate", {"to": manifest.id, "from": observed.active}),
            StepSpec(
                "prune",
                {"keep": keep, "keep_images": _left_out(manifest, observed.runtimes.get(observed.active or ""))},
            ),
        ]
    return steps


def shown_runtime(observed: Observed) -> Manifest | None:
    """The runtime whose set is merged now: the active one, or None when nothing of it is merged."""
    active = observed.runtimes.get(observed.active or "")
    if active is None:
        return None
    merged = {(kind, name) for kind, names in observed.merged.names.items() for name in names}
    return (
        active if any((kind, name) in merged for kind, names in merge_names(active).items() for name in names) else None
    )


def leaving(observed: Observed, wanted: Wanted) -> list[Extension]:
    """The extensions whose images the change takes out of the running overlay, or lays anew."""
    shown = shown_runtime(observed)
    return _difference(shown, None if wanted.kind is ChangeKind.UNMERGE else wanted.manifest, wanted.kind)[0]


def _difference(
    shown: Manifest | None, to: Manifest | None, kind: ChangeKind
) -> tuple[list[Extension], list[Extension]]:
    """What leaves and what comes. Where the overlay is laid anew although its images may be the same, that is all."""
    old = list(shown.extensions) if shown else []
    new = list(to.extensions) if to else []
    if kind not in _MOVES:
        return old, new
    same = {(e.name, e.image_id) for e in old} & {(e.name, e.image_id) for e in new}
    return [e for e in old if (e.name, e.image_id) not in same], [e for e in new if (e.name, e.image_id) not in same]


def _bring(observed: Observed, wanted: Wanted, manifest: Manifest) -> list[StepSpec]:
    """The images and the runtime's folder are on the disk."""
    steps: list[StepSpec] = []
    active = observed.runtimes.get(observed.active or "")
    if _must_prune_first(observed, wanted, manifest):
        keep = [runtime for runtime in (observed.active, observed.previous, manifest.id) if runtime]
        steps.append(StepSpec("prune", {"keep": keep, "keep_images": _spared(observed, manifest)}))
    bases = [e for e in active.extensions if e.image_id in observed.images and e.sha256] if active else []
    fetch = {
        "source": wanted.source,
        "extensions": [_plain(extension) for extension in manifest.extensions],
        "held": [_plain(extension) for extension in bases],
    }
    stage = {
        "manifest": manifest.model_dump(mode="json", exclude_none=True),
        "os_release": dict(observed.os_release),
        "arch": observed.arch,
    }
    return [*steps, StepSpec("fetch_images", fetch), StepSpec("stage_runtime", stage)]


def _warmed_up(observed: Observed, wanted: Wanted, shown: Manifest | None, manifest: Manifest) -> list[StepSpec]:
    """The new set's model is tried while the old one serves. Where none does, there is nobody to spare the wait."""
    old, new = _difference(shown, manifest, wanted.kind)
    owned = _owned_by(observed, old)
    # What a new image owns may be known only once it has come; one of an extension that is there owns what that owned.
    known = {e.name for e in old if e.image_id in observed.releases}
    unread = any(e.image_id not in observed.releases and e.name not in known for e in new)
    concerned = INFERENCE_UNIT in (*owned, *_owned_by(observed, new)) or unread
    if not wanted.warm_up or observed.inference is None or not concerned:
        return []
    npu = _npu(observed)
    inputs = {"to": manifest.id, "units": owned, "images": [_plain(e) for e in new]}
    shared = {"nodes": npu["nodes"], "contexts": npu["contexts"], "backend": observed.inference.backend}
    return [StepSpec("warm_up", inputs | shared)]


def _must_prune_first(observed: Observed, wanted: Wanted, manifest: Manifest) -> bool:
    """Whether the images fit only after a prune. Raises `no-space` when they do not fit even then."""
    missing = [e for e in manifest.extensions if e.image_id not in observed.images]
    # What is there of an image is written over or gone on with.
    left = sum(max(0, e.size_bytes - observed.parts.get(e.image_id, 0)) for e in missing)
    needed = left + SPARE_BYTES if missing else 0
    if needed <= observed.free_bytes:
        return False
    kept = [observed.runtimes[r] for r in (observed.active, observed.previous) if r and r in observed.runtimes]
    used = {e.image_id for m in kept for e in m.extensions} | set(_spared(observed, manifest))
    freeable = sum(size for image, size in observed.images.items() if image not in used)
    freeable += sum(size for image, size in observed.parts.items() if image not in used or image in observed.images)
    if needed > observed.free_bytes + freeable:
        raise OperationError(
            ErrorCode.NO_SPACE,
            f"cannot {_VERBS[wanted.kind]} runtime {manifest.runtime.name} {manifest.runtime.version}:"
            f" it needs {_mib(needed)} MiB, and {_mib(observed.free_bytes + freeable)} MiB are free"
            " with everything unused removed",
            "Free space on the file system of /var/lib/avocado.",
            {"needed_bytes": needed, "free_bytes": observed.free_bytes, "freeable_bytes": freeable},
        )
    return True


def _switch(observed: Observed, shown: Manifest | None, to: Manifest | None, kind: ChangeKind) -> list[StepSpec]:
    """The running overlay shows `to`, with the services of whatever changes stopped meanwhile."""
    old, new = _difference(shown, to, kind)
    owned = _owned_by(observed, old)
    bystanders = [unit for unit in observed.bystanders.units if unit not in owned]
    images, gone = [_plain(e) for e in new], [_plain(e) for e in old]
    affected = {"units": [*owned, *bystanders], "bystanders": bystanders, "images": images}
    merged = {kind.value: list(names) for kind, names in observed.merged.names.items() if names}
    # An active runtime whose manifest is lost is merged all the same, and the way back leads to all that is.
    unread = observed.active if merged and _lost_manifest(observed) else None
    overlay = {
        "from": unread or (shown.id if shown else None),
        "to": to.id if to else None,
        "from_names": merged if unread else merge_names(shown) if shown else {},
        "to_names": merge_names(to) if to else {},
    }
    steps = []
    if old or new:
        left_alone = {"unread": list(observed.bystanders.unread), "jobs": list(observed.bystanders.jobs)}
        stopping = affected | left_alone | {"leaving": gone, "after_stuck": observed.after_stuck}
        steps += [
            StepSpec("stop_services", stopping),
            StepSpec("release_npu", affected | _npu(observed) | {"silent": observed.silent}),
        ]
    steps += [
        StepSpec("switch_overlay", overlay),
        StepSpec("reload", {"images": images, "leaving": gone}),
    ]
    if to is not None:
        # A unit file may be among what was left out here.
        starting = affected | {"partial": is_partial(to)}
        # Only a set that is to be booted: what boots already is merged again, whatever its agent says.
        agent = {"brings_agent": kind in _MOVES and any(e.name == AGENT_EXTENSION for e in new)}
        steps += [StepSpec("start_services", starting), StepSpec("confirm_health", starting | agent)]
    return steps


def _spared(observed: Observed, manifest: Manifest) -> list[str]:
    """What a prune before the fetch leaves, beside the images of the runtimes on the board."""
    wanted = [extension.image_id for extension in manifest.extensions]
    return wanted + _left_out(observed.runtimes.get(observed.active or ""), manifest)


def _left_out(*manifests: Manifest | None) -> list[str]:
    """Images of extensions that were disabled here: enabling them must not need a host."""
    bases = [signed(manifest)[0] for manifest in manifests if manifest]
    listed = {extension.image_id for manifest in manifests if manifest for extension in manifest.extensions}
    return sorted({extension.image_id for base in bases for extension in base.extensions} - listed)


def _confirmed(observed: Observed, wanted: Wanted, shown: Manifest | None, to: Manifest | None) -> list[StepSpec]:
    """Where /etc changes somebody has to come back; a board's own change is confirmed by whoever sits at it."""
    from_afar = wanted.await_host or wanted.kind is ChangeKind.DEPLOY
    if not from_afar or not changes_etc(observed.merged, shown, to):
        return []
    server = None if (wanted.source or "unix:").startswith("unix:") else wanted.source
    return [StepSpec("await_confirmation", {"within_s": within_s(to or shown), "server": server})]


def _unmerge(observed: Observed, wanted: Wanted) -> list[StepSpec]:
    shown = shown_runtime(observed)
    _check_links(observed, wanted.kind)
    return (
        _switch(observed, shown, None, ChangeKind.UNMERGE) + _confirmed(observed, wanted, shown, None) if shown else []
    )


def _npu(observed: Observed) -> dict[str, Any]:
    inference = observed.inference
    npu = (
        NpuFacts(inference.nodes, inference.settle_s, inference.contexts)
        if inference and inference.nodes
        else observed.last_npu
    )
    if npu is None:
        return {"nodes": [], "settle_s": 0.0, "contexts": 0}
    return {"nodes": list(npu.nodes), "settle_s": npu.settle_s, "contexts": npu.contexts}


def _the_manifest(observed: Observed, wanted: Wanted) -> Manifest:
    if wanted.manifest is not None:
        return wanted.manifest
    if wanted.kind in (ChangeKind.MERGE, ChangeKind.REFRESH):
        active = observed.runtimes.get(observed.active or "")
        _check_links(observed, wanted.kind)
        if active is not None and (active.extensions or not isinstance(active, LinkedRuntime)):
            return active
        if observed.active is not None:
            raise _nothing_known(observed, wanted.kind)
        raise OperationError(
            ErrorCode.NOT_FOUND,
            f"cannot {_VERBS[wanted.kind]} the extensions: no runtime is active",
            "Deploy one from the host: 'avocadoctl -H BOARD deploy'.",
        )
    raise OperationError(
        ErrorCode.NOT_FOUND,
        f"cannot {_VERBS[wanted.kind]} a runtime: there is none to change to",
        "Run 'avocadoctl runtime list' to see what is on the board.",
    )


def _lost_manifest(observed: Observed) -> bool:
    """The active runtime's manifest cannot be read."""
    active = observed.active
    return active is not None and isinstance(observed.runtimes.get(active), LinkedRuntime | None)


def _check_links(observed: Observed, kind: ChangeKind) -> None:
    """Where only its links speak for the active runtime, they name all that is merged."""
    if _lost_manifest(observed) and not observed.merged.is_within(observed.runtimes.get(observed.active or "")):
        raise _nothing_known(observed, kind)


def _nothing_known(observed: Observed, kind: ChangeKind) -> OperationError:
    return OperationError(
        ErrorCode.BAD_MANIFEST,
        f"cannot {_VERBS[kind]} the extensions: the manifest of runtime {observed.active} cannot be read, and its links"
        " do not tell what is merged",
        "Deploy again from the host: avocadoctl deploy -H BOARD",
    )


def _stands(observed: Observed, manifest: Manifest) -> bool:
    """Every image is held, and these images are merged and no others."""
    held = all(extension.image_id in observed.images for extension in manifest.extensions)
    return held and observed.merged.is_exactly(manifest)


def _owned_by(observed: Observed, extensions: Iterable[Extension]) -> list[str]:
    releases = (observed.releases.get(e.image_id, {}).get(Kind(kind), {}) for e in extensions for kind in e.types)
    owned = (unit for release in releases for unit in owned_services(release))
    return [unit for unit in dict.fromkeys(owned) if unit not in (AGENT_UNIT, *BUS_UNITS)]


def _plain(extension: Extension) -> dict[str, Any]:
    return extension.model_dump(mode="json")


def _mib(size_bytes: int) -> int:
    return -(-size_bytes // (1024 * 1024))


_MOVES = frozenset({ChangeKind.DEPLOY, ChangeKind.ACTIVATE, ChangeKind.ROLLBACK, ChangeKind.ENABLE, ChangeKind.DISABLE})
_VERBS = {
    ChangeKind.DEPLOY: "deploy",
    ChangeKind.ACTIVATE: "activate",
    ChangeKind.ROLLBACK: "roll back to",
    ChangeKind.ENABLE: "change to",
    ChangeKind.DISABLE: "change to",
    ChangeKind.REFRESH: "refresh",
    ChangeKind.MERGE: "merge",
    ChangeKind.UNMERGE: "unmerge",
}

"""The plan: what is observed and what is wanted become an ordered list of steps, or one clear refusal.

Pure. Every condition that can be known before anything is touched is checked here: target board, architecture,
interpreter, agent, operating system, extension compatibility as far as the images are on the board, free space. A
step is a kind and plain JSON inputs, so the journal can rebuild the list after a restart; printing the list is the
documentation of an update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agent.contract.manifest import Manifest
from agent.extensions import Kind, MergedSet
from agent.health import InferenceState, UnitState


class ChangeKind(StrEnum):
    """What was asked for. Deploy, activate and rollback move the boot set; the others only the running overlay."""

    DEPLOY = "deploy"
    ACTIVATE = "activate"
    ROLLBACK = "rollback"
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
class Observed:
    """The board before the change, gathered by the daemon from its ports.

    `images` maps every complete image to its size in bytes. `releases` has the extension-release keys of images on
    the board, by image id and kind, as far as they could be read. `services` has the state of every unit that
    `owned_services(releases of the shown set)` names. `last_npu` comes from the newest change record whose facts have
    `npu`. `after_stuck`: the last change ended stuck, so a stopped service is not a wish.
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
    services: Mapping[str, UnitState]
    free_bytes: int
    inference: InferenceState | None = None
    last_npu: NpuFacts | None = None
    after_stuck: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for. `manifest` is None only for unmerge; merge and refresh take the active runtime's.

    `source` is the deploy source string; `transfers` maps an image id to the bytes its cheapest transfer moves.
    """

    kind: ChangeKind
    manifest: Manifest | None
    source: str | None = None
    transfers: Mapping[str, int] = field(default_factory=dict)

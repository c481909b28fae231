"""Boards as a plan sees them, and what may be asked of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agent.contract.manifest import Manifest
from agent.extensions import Kind, MergedSet
from agent.health import InferenceState
from agent.plan import ChangeKind, Observed, StepSpec, Wanted
from tests.change.sets import OS_RELEASE, releases, runtime

R0 = runtime("0", pose_model="0")
R1 = runtime("1")
R2 = runtime("2", pose_model="2")
AGENT = runtime("3", avocado_agent="3")
INFERENCE = InferenceState("serving", "npu", "ok", "npu", "movenet 1", 99, True, True, ("/dev/simnpu0",), 0.2, 1)
WHOLE = [
    "fetch_images",
    "stage_runtime",
    "stop_services",
    "release_npu",
    "switch_overlay",
    "reload",
    "start_services",
    "confirm_health",
    "activate",
    "prune",
]
CONFIRMED = [*WHOLE[:-2], "await_confirmation", *WHOLE[-2:]]
VOLATILE = ["stop_services", "release_npu", "switch_overlay", "reload", "start_services", "confirm_health"]


def links(manifest: Manifest) -> MergedSet:
    names: dict[Kind, list[str]] = {kind: [] for kind in Kind}
    for extension in manifest.extensions:
        for kind in extension.types:
            names[Kind(kind)].append(manifest.link_name(extension).removesuffix(".raw"))
    return MergedSet({kind: tuple(sorted(found)) for kind, found in names.items()})


def board(active: Manifest | None = R1, *others: Manifest, **changed: Any) -> Observed:
    staged = [manifest for manifest in (active, *others) if manifest]
    observed = Observed(
        target="virtual",
        arch="x86_64",
        python="3.13",
        agent_version="1.2.0",
        os_release=OS_RELEASE,
        active=active.id if active else None,
        previous=others[0].id if others else None,
        runtimes={manifest.id: manifest for manifest in staged},
        images={e.image_id: e.size_bytes for m in staged for e in m.extensions},
        releases=releases(*staged),
        merged=links(active) if active else MergedSet({}),
        free_bytes=1 << 40,
        inference=INFERENCE if active else None,
    )
    return replace(observed, **changed)


def deploy(manifest: Manifest) -> Wanted:
    return Wanted(ChangeKind.DEPLOY, manifest, source="http://host/")


def step(steps: list[StepSpec], kind: str) -> dict[str, Any]:
    return next(spec.inputs for spec in steps if spec.kind == kind)


def names(images: list[dict[str, Any]]) -> list[str]:
    return [image["name"] for image in images]


def other_image() -> MergedSet:
    """The names of R1, one of them another image's."""
    return replace(links(R1), images={Kind.SYSEXT: {"98-pose-model": image(R2, "pose-model")}})


def stranger() -> MergedSet:
    """R1, and what somebody merged beside it."""
    names = links(R1).names
    return MergedSet({**names, Kind.SYSEXT: ("10-stranger", *names[Kind.SYSEXT])})


def image(manifest: Manifest, name: str) -> str:
    return next(extension.image_id for extension in manifest.extensions if extension.name == name)

"""Runtimes for tests: the example's extensions in several versions, named by content as real ones are."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from agent.contract.manifest import Manifest, image_id, sha256_hex
from agent.extensions import Kind

OS_RELEASE = {"ID": "debian", "VERSION_ID": "13"}
POSE = {"AVOCADO_ENABLE_SERVICES": "pose.service"}
# name -> types, extension-release keys beside ID
EXTENSIONS: Mapping[str, tuple[list[str], dict[str, str]]] = {
    "pose-config": (["confext"], POSE),
    "pose-model": (["sysext"], POSE),
    "pose-app": (["sysext"], POSE),
    "npu-virtual": (["sysext"], POSE | {"AVOCADO_MODPROBE": "simnpu"}),
    "avocado-agent": (["sysext"], {"AVOCADO_ENABLE_SERVICES": "avocadod.service"}),
}


def runtime(version: str, **versions: str) -> Manifest:
    """A runtime of the board `virtual`; keyword `pose_model="2"` gives one extension another version."""
    of = {name: versions.get(name.replace("-", "_"), "1") for name in EXTENSIONS}
    document: dict[str, Any] = {
        "manifest_version": 1,
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"runtime {version}")),
        "built_at": "2026-11-30T20:00:00Z",
        "runtime": {"name": "npu-pose", "version": version},
        "target": "virtual",
        "arch": "x86_64",
        "extensions": [_extension(name, of[name]) for name in EXTENSIONS if of[name]],
    }
    return Manifest.model_validate(document)


def with_keys(manifest: Manifest, **keys: Any) -> Manifest:
    """The same manifest with some keys replaced."""
    return Manifest.model_validate(manifest.model_dump() | keys)


def releases(*manifests: Manifest) -> dict[str, dict[Kind, dict[str, str]]]:
    """The release files inside the images."""
    found: dict[str, dict[Kind, dict[str, str]]] = {}
    for manifest in manifests:
        for extension in manifest.extensions:
            keys = OS_RELEASE | {"ARCHITECTURE": "x86-64"} | EXTENSIONS[extension.name][1]
            found[extension.image_id] = {Kind(kind): dict(keys) for kind in extension.types}
    return found


def _extension(name: str, version: str) -> dict[str, Any]:
    content = sha256_hex(f"{name} {version}".encode())
    return {
        "name": name,
        "version": version,
        "image_id": image_id(content),
        "sha256": content,
        "size_bytes": 1000,
        "types": EXTENSIONS[name][0],
    }

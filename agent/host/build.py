"""A project, a target and a runtime become images and an unsigned manifest.

The manifest of an unchanged build is the same document, its id and time included, so that deploying it again is seen to
be nothing new; any change gives a new id and a newer time, also when it goes back to what was built before.
"""

from __future__ import annotations

import json
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from agent.contract.errors import OperationError
from agent.contract.manifest import (
    IMAGE_NAMESPACE,
    MANIFEST_VERSION,
    Manifest,
    format_time,
    manifest_bytes,
    parse_manifest,
    parse_time,
)
from agent.host.image import BuiltImage, build_image, image_path
from agent.host.project import Project, RuntimePart
from agent.host.report import Report, megabytes
from agent.host.transfers import TransferCache


@dataclass(frozen=True, slots=True)
class BuiltRuntime:
    """A runtime, ready to be signed."""

    manifest: Manifest
    images: tuple[BuiltImage, ...]
    manifest_path: Path
    seconds: float

    @property
    def image_paths(self) -> dict[str, Path]:
        """Every image of the runtime by id."""
        return {image.extension.image_id: image.path for image in self.images}

    def as_dict(self) -> dict[str, Any]:
        """The JSON of `build -o json`."""
        return {
            "runtime": self.manifest.model_dump(exclude_none=True),
            "manifest": str(self.manifest_path),
            "images": {
                image.extension.name: {"path": str(image.path), "built": image.is_new, "notices": list(image.notices)}
                for image in self.images
            },
            "seconds": round(self.seconds, 3),
        }


def build_runtime(project: Project, name: str | None, report: Report) -> BuiltRuntime:
    """Build every image of the runtime and write its manifest below the build folder."""
    started = time.monotonic()
    runtime_name, part = project.runtime(name)
    images = _build_images(project, part, report)
    notices = {notice for image in images for notice in image.notices}
    for notice in sorted(notices):
        report.say(f"  note: {notice}")
    path = project.build_folder / "runtimes" / project.target.board / f"{runtime_name}.json"
    manifest = _manifest(project, runtime_name, part, images, path)
    data = manifest_bytes(manifest)
    for written in (path, _kept(project, runtime_name) / f"{manifest.id}.json"):
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_bytes(data)
    return BuiltRuntime(manifest, images, path, time.monotonic() - started)


def _build_images(project: Project, part: RuntimePart, report: Report) -> tuple[BuiltImage, ...]:
    """Two at a time: one compresses while the other one installs."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        waiting = [(name, pool.submit(build_image, project, name)) for name in part.extensions]
        images = []
        try:
            for name, future in waiting:
                report.show(f"building {name} for {project.target.board}")
                image = future.result()
                state = "built" if image.is_new else "unchanged"
                report.say(
                    f"  {image.extension.name} {image.extension.version}: {state}, "
                    f"{megabytes(image.extension.size_bytes)}, {image.extension.image_id[:8]}"
                )
                images.append(image)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return tuple(images)


def _manifest(project: Project, name: str, part: RuntimePart, images: tuple[BuiltImage, ...], path: Path) -> Manifest:
    built_with: dict[str, str] = {}
    for image in images:
        built_with |= image.built_with
    requires: dict[str, Any] = {"os": {"ID": project.target.os_id, "VERSION_ID": project.target.os_version_id}}
    if any(project.document.extensions[image.extension.name].python for image in images):
        requires["python"] = project.target.python
    if part.requires_agent:
        requires["agent"] = part.requires_agent
    content = {
        "manifest_version": MANIFEST_VERSION,
        "runtime": {"name": name, "version": part.version},
        "extensions": [image.extension.model_dump() for image in images],
        "target": project.target.board,
        "arch": project.target.arch,
        "requires": requires,
        "built_with": built_with,
        **({"allow_downgrade": True} if part.allow_downgrade else {}),
        **({"confirm": {"within_s": part.confirm_within_s}} if part.confirm_within_s else {}),
    }
    previous = _previous(path)
    built_at = _now(after=previous)
    if previous is not None and _names_content(previous, content):
        built_at = previous.built_at
    document = {**content, "id": _runtime_id(content, built_at), "built_at": built_at}
    return parse_manifest(json.dumps(document).encode())


def _runtime_id(content: dict[str, Any], built_at: str) -> str:
    return str(uuid.uuid5(IMAGE_NAMESPACE, json.dumps([content, built_at], sort_keys=True)))


def _names_content(manifest: Manifest, content: dict[str, Any]) -> bool:
    return manifest.id == _runtime_id(content, manifest.built_at)


def _now(*, after: Manifest | None) -> str:
    """Now; a second later than the manifest before it at least, since boards refuse what is not newer."""
    now = datetime.now(UTC)
    if after is not None:
        now = max(now, parse_time(after.built_at) + timedelta(seconds=1))
    return format_time(now)


def _previous(path: Path) -> Manifest | None:
    try:
        return parse_manifest(path.read_bytes())
    except FileNotFoundError:
        return None
    except OperationError:
        return None  # of another version of this program: it is written anew


def earlier_images(project: Project, manifest: Manifest, runtimes: int) -> dict[str, list[Path]]:
    """For each image of the manifest, the images of the same extension in the runtimes built here before it."""
    kept = [parse_manifest(path.read_bytes()) for path in _kept(project, manifest.runtime.name).glob("*.json")]
    earlier = [other for other in kept if other.id != manifest.id and other.built_at < manifest.built_at]
    earlier.sort(key=lambda other: other.built_at, reverse=True)
    found: dict[str, list[Path]] = {extension.image_id: [] for extension in manifest.extensions}
    for extension in manifest.extensions:
        for other in (other for runtime in earlier[:runtimes] for other in runtime.extensions):
            path = held_image(project, other.image_id) if other.name == extension.name else None
            if path is not None and other.image_id != extension.image_id and path not in found[extension.image_id]:
                found[extension.image_id].append(path)
    return found


def _kept(project: Project, runtime_name: str) -> Path:
    return project.build_folder / "runtimes" / project.target.board / runtime_name


def held_image(project: Project, image_id: str) -> Path | None:
    """An image a board says it holds, if it was built here and is still there."""
    path = image_path(project.build_folder, image_id)
    return path if path.is_file() else None


def transfer_cache(project: Project) -> TransferCache:
    """Where transfers between images of this project are kept."""
    images = image_path(project.build_folder, "x").parent
    return TransferCache(project.build_folder / "cache" / "transfers", images)

"""A signed repository in a folder of plain files, which any web server or `deploy` can serve.

`metadata/` and `targets/` follow TUF with consistent snapshots: every file but `timestamp.json` is named for its
version or its hash and never changes. New files are written first and `timestamp.json` is renamed last, so whoever
reads the folder at any moment sees one whole repository. One repository serves one target board.

Versions are seconds since the epoch, and always above the last one: a repository that was deleted and made again, or a
second developer's, is still newer than what a board has seen.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp
from tuf.api.serialization import DeserializationError

from agent.contract.delta import (
    MANIFEST_NAME,
    Transfer,
    delta_name,
    full_name,
    parse_transfer,
)
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Manifest, image_id, manifest_bytes, parse_manifest, parse_time
from agent.delta.apply import file_sha256
from agent.delta.encode import Effort
from agent.host.keys import Keys
from agent.host.transfers import Progress, TransferCache, make_transfer

TARGETS_LIFE = timedelta(days=90)
TIMESTAMP_LIFE = timedelta(days=7)
# How many older snapshots stay readable for a board that is in the middle of a fetch.
_KEPT_SNAPSHOTS = 2
_CLOCK_TOLERANCE = timedelta(hours=1)

SignedT = TypeVar("SignedT", Root, Snapshot, Targets, Timestamp)


@dataclass(frozen=True, slots=True)
class Published:
    """What a publication offers: per image the bytes of the full transfer and of each delta, by base image id."""

    version: int
    full_bytes: Mapping[str, int]
    delta_bytes: Mapping[str, Mapping[str, int]]
    expires: datetime


@dataclass(slots=True)
class _Offer:
    """The entries of the targets metadata, with the file behind each."""

    entries: dict[str, TargetFile] = field(default_factory=dict)

    def add(self, transfer: Transfer) -> None:
        self.add_file(transfer.name, transfer.size_bytes, transfer.sha256, {"custom": transfer.custom()})

    def add_file(self, name: str, size: int, sha256: str, extra: dict[str, Any] | None = None) -> None:
        self.entries[name] = TargetFile(size, {"sha256": sha256}, name, extra)


def publish(
    folder: Path,
    manifest: Manifest,
    images: Mapping[str, Path],
    bases: Mapping[str, Sequence[Path]],
    keys: Keys,
    *,
    only: Collection[str] | None = None,
    full_effort: Effort = Effort.BEST,
    cache: TransferCache | None = None,
    now: datetime | None = None,
    progress: Progress | None = None,
) -> Published:
    """Make or update the repository in `folder` so that it offers `manifest`.

    `images`: the file of each image, by id. `bases`: per image id the older images to make deltas from. `only`: the
    ids that need a transfer at all (None: every one). `full_effort`: what full transfers are worth; deltas are always
    made with the best. `cache`: where transfers made before are found. Raises `keys`, `bad-manifest`, `wrong-target`.
    """
    moment = (now or datetime.now(UTC)).replace(microsecond=0)
    _check(folder, manifest, moment)
    for part in ("metadata", "targets"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    offer = _Offer()
    full_bytes: dict[str, int] = {}
    delta_bytes: dict[str, dict[str, int]] = {}
    known = _known_transfers(folder)
    make = functools.partial(make_transfer, folder / "targets", cache=cache, progress=progress)

    for extension in manifest.extensions:
        if only is not None and extension.image_id not in only:
            continue
        image = images[extension.image_id]
        name = full_name(extension.image_id)
        full = known.get(name) or make(None, image, name, effort=full_effort)
        offer.add(full)
        full_bytes[extension.image_id] = full.size_bytes
        delta_bytes[extension.image_id] = {}
        for base in bases.get(extension.image_id, ()):
            base_id = image_id(file_sha256(base))
            if base_id == extension.image_id:
                continue
            name = delta_name(base_id, extension.image_id)
            delta = known.get(name) or make(base, image, name, effort=Effort.BEST)
            if delta.size_bytes < full.size_bytes:  # otherwise the full transfer is the better delta
                offer.add(delta)
                delta_bytes[extension.image_id][base_id] = delta.size_bytes
    data = manifest_bytes(manifest)
    sha256 = hashlib.sha256(data).hexdigest()
    _write(folder / "targets" / f"{sha256}.{MANIFEST_NAME}", data)
    offer.add_file(MANIFEST_NAME, len(data), sha256)
    version, expires = _sign_all(folder, offer, keys, moment)
    _prune(folder)
    if cache:
        cache.prune()
    return Published(version, full_bytes, delta_bytes, expires)


def refresh(folder: Path, keys: Keys, *, now: datetime | None = None) -> datetime:
    """Sign snapshot and timestamp again, with the online key only; the new expiry of the timestamp."""
    moment = (now or datetime.now(UTC)).replace(microsecond=0)
    timestamp = _current(folder, "timestamp", Timestamp)
    if timestamp is None:
        raise OperationError(
            ErrorCode.NOT_FOUND, f"cannot refresh {folder}: it is not a repository", "Publish into it first."
        )
    targets_meta = _read(folder, f"{timestamp.signed.snapshot_meta.version}.snapshot.json", Snapshot).signed.meta
    return _sign_online(folder, targets_meta["targets.json"], keys, moment)[1]


def _check(folder: Path, manifest: Manifest, moment: datetime) -> None:
    if parse_time(manifest.built_at) > moment + _CLOCK_TOLERANCE:
        raise OperationError(
            ErrorCode.BAD_MANIFEST,
            f"cannot publish runtime {manifest.id}: it says it was built at {manifest.built_at}, which is to come",
            "Correct this machine's clock and build again.",
        )
    served = _served_manifest(folder)
    if served is not None and served.target != manifest.target:
        raise OperationError(
            ErrorCode.WRONG_TARGET,
            f"cannot publish for {manifest.target} into {folder}: it serves {served.target}",
            "Keep one repository for each target.",
        )


def _served_manifest(folder: Path) -> Manifest | None:
    targets = _current_targets(folder)
    if targets is None:
        return None
    entry = targets.signed.targets[MANIFEST_NAME]
    return parse_manifest((folder / "targets" / f"{entry.hashes['sha256']}.{MANIFEST_NAME}").read_bytes())


def _known_transfers(folder: Path) -> dict[str, Transfer]:
    """The transfers that are offered now; an image's name is its content, so they hold for the next runtime too."""
    targets = _current_targets(folder)
    found: dict[str, Transfer] = {}
    for name, entry in targets.signed.targets.items() if targets else ():
        transfer = parse_transfer(name, entry.length, entry.hashes["sha256"], entry.custom or {})
        if transfer and (folder / "targets" / f"{transfer.sha256}.{name}").is_file():
            found[name] = transfer
    return found


def _sign_all(folder: Path, offer: _Offer, keys: Keys, moment: datetime) -> tuple[int, datetime]:
    version = _next_version(_current_targets(folder), moment)
    targets = Metadata(Targets(version=version, expires=moment + TARGETS_LIFE, targets=offer.entries))
    targets.sign(keys.signer("targets"))
    data = targets.to_bytes()
    _write(folder / "metadata" / f"{version}.targets.json", data)
    return _sign_online(folder, _meta(version, data), keys, moment)


def _sign_online(folder: Path, targets_meta: MetaFile, keys: Keys, moment: datetime) -> tuple[int, datetime]:
    # Every version: a board that was away for a year follows the roots one by one.
    for number, root in keys.roots().items():
        _write(folder / "metadata" / f"{number}.root.json", root)
    current = _current(folder, "timestamp", Timestamp)
    version = _next_version(current, moment)
    snapshot = Metadata(Snapshot(version=version, expires=moment + TARGETS_LIFE, meta={"targets.json": targets_meta}))
    snapshot.sign(keys.signer("snapshot"))
    data = snapshot.to_bytes()
    _write(folder / "metadata" / f"{version}.snapshot.json", data)
    expires = moment + TIMESTAMP_LIFE
    timestamp = Metadata(Timestamp(version=version, expires=expires, snapshot_meta=_meta(version, data)))
    timestamp.sign(keys.signer("timestamp"))
    _write(folder / "metadata" / "timestamp.json", timestamp.to_bytes())
    return version, expires


def _meta(version: int, data: bytes) -> MetaFile:
    return MetaFile(version, len(data), {"sha256": hashlib.sha256(data).hexdigest()})


def _next_version(current: Metadata[Any] | None, moment: datetime) -> int:
    return max(int(moment.timestamp()), current.signed.version + 1 if current else 1)


def _current_targets(folder: Path) -> Metadata[Targets] | None:
    timestamp = _current(folder, "timestamp", Timestamp)
    if timestamp is None:
        return None
    snapshot = _read(folder, f"{timestamp.signed.snapshot_meta.version}.snapshot.json", Snapshot)
    return _read(folder, f"{snapshot.signed.meta['targets.json'].version}.targets.json", Targets)


def _current(folder: Path, role: str, kind: type[SignedT]) -> Metadata[SignedT] | None:
    return _read(folder, f"{role}.json", kind) if (folder / "metadata" / f"{role}.json").exists() else None


def _read(folder: Path, name: str, kind: type[SignedT]) -> Metadata[SignedT]:
    path = folder / "metadata" / name
    try:
        found: Metadata[SignedT] = Metadata.from_bytes(path.read_bytes())
        if isinstance(found.signed, kind):
            return found
        why = "it is another role's"
    except (OSError, DeserializationError) as cause:
        why = str(cause) or type(cause).__name__
    raise OperationError(
        ErrorCode.METADATA_INVALID, f"cannot read {path}: {why}", "Delete the repository's folder and publish again."
    )


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.new")
    part.write_bytes(data)
    part.replace(path)


def _prune(folder: Path) -> None:
    """Remove what no board can still be reading: files that only older snapshots than the last few name."""
    snapshots = sorted((folder / "metadata").glob("*.snapshot.json"), key=_version_of)
    doomed, kept = snapshots[:-_KEPT_SNAPSHOTS], snapshots[-_KEPT_SNAPSHOTS:]
    versions = {json.loads(path.read_bytes())["signed"]["meta"]["targets.json"]["version"] for path in kept}
    alive: set[str] = set()
    for path in (folder / "metadata").glob("*.targets.json"):
        if _version_of(path) in versions:
            entries = json.loads(path.read_bytes())["signed"]["targets"]
            alive |= {f"{entry['hashes']['sha256']}.{name}" for name, entry in entries.items()}
        else:
            doomed.append(path)
    doomed += [path for path in (folder / "targets").iterdir() if path.name not in alive]
    for path in doomed:
        path.unlink()


def _version_of(path: Path) -> int:
    return int(path.name.partition(".")[0])

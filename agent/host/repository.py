"""A signed repository in a folder of plain files, which any web server or `deploy` can serve.

`metadata/` and `targets/` follow TUF with consistent snapshots: every file but `timestamp.json` is named for its
version or its hash and never changes. New files are written first and `timestamp.json` is renamed last, so whoever
reads the folder at any moment sees one whole repository. One process at a time writes it (`.lock`): what nothing names
is removed, and what another one has not signed yet would be. One repository serves one target board. What it holds is
listed in `releases.json`, signed with a release key; `targets.json` is the owner's, as it lies in the keys folder.

Versions are seconds since the epoch, and always above the last one: a repository that was deleted and made again, or a
second developer's, is still newer than what a board has seen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp
from tuf.api.serialization import DeserializationError

from agent.contract.delta import (
    MANIFEST_NAME,
    RELEASES,
    Transfer,
    delta_name,
    full_name,
    parse_transfer,
)
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Manifest, image_id, manifest_bytes, parse_manifest, parse_time
from agent.delta.encode import Effort
from agent.delta.stream import file_sha256
from agent.host.alone import alone
from agent.host.delegation import signed_delegation
from agent.host.keys import Keys
from agent.host.transfers import Progress, TransferCache, hashed_name, is_whole, make_transfer

RELEASES_LIFE = timedelta(days=90)
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
    """The entries of the releases metadata, with the file behind each."""

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
    spare_effort: Effort = Effort.BEST,
    cache: TransferCache | None = None,
    now: datetime | None = None,
    progress: Progress | None = None,
) -> Published:
    """Make or update the repository in `folder` so that it offers `manifest`.

    `images`: the file of each image, by id. `bases`: per image id the older images to make deltas from. `only`: the
    ids that need a transfer at all (None: every one). `spare_effort`: what a full transfer is worth that a delta stands
    beside; deltas, and what stands alone, are made with the best. `cache`: where transfers made before are found.
    Raises `keys`, `bad-manifest`, `wrong-target`, `change-running`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder / ".lock", f"publish into {folder}"):
        moment = (now or datetime.now(UTC)).replace(microsecond=0)
        _check(folder, manifest, moment)
        for part in ("metadata", "targets"):
            (folder / part).mkdir(exist_ok=True)
        offer = _Offer()
        full_bytes: dict[str, int] = {}
        delta_bytes: dict[str, dict[str, int]] = {}
        known = _known_transfers(folder)

        def transfer(name: str, base: Path | None, image: Path, effort: Effort) -> Transfer:
            found = known(name) if effort is spare_effort else None  # what lies here may have been made in a hurry
            targets = folder / "targets"
            return found or make_transfer(targets, base, image, name, effort=effort, cache=cache, progress=progress)

        for extension in manifest.extensions:
            made = extension.image_id
            if only is not None and made not in only:
                continue
            from_base = {image_id(file_sha256(base)): base for base in bases.get(made, ())}
            deltas = {
                base_id: transfer(delta_name(base_id, made), base, images[made], Effort.BEST)
                for base_id, base in from_base.items()
                if base_id != made
            }
            full = transfer(full_name(made), None, images[made], spare_effort if deltas else Effort.BEST)
            # A larger delta is none: the full transfer is the better one.
            smaller = {base_id: delta for base_id, delta in deltas.items() if delta.size_bytes < full.size_bytes}
            for each in (full, *smaller.values()):
                offer.add(each)
            full_bytes[made] = full.size_bytes
            delta_bytes[made] = {base_id: delta.size_bytes for base_id, delta in smaller.items()}
        data = manifest_bytes(manifest)
        sha256 = hashlib.sha256(data).hexdigest()
        _write(folder / "targets" / hashed_name(sha256, MANIFEST_NAME), data)
        offer.add_file(MANIFEST_NAME, len(data), sha256)
        _check_whole(folder, offer)
        version, expires = _sign_all(folder, offer, keys, moment)
        _prune(folder)
        if cache:
            cache.prune()
        return Published(version, full_bytes, delta_bytes, expires)


def refresh(folder: Path, keys: Keys, *, now: datetime | None = None) -> datetime:
    """Sign snapshot and timestamp again, with the online key only; the new expiry of the timestamp."""
    if not (folder / "metadata" / "timestamp.json").exists():
        raise OperationError(
            ErrorCode.NOT_FOUND, f"cannot refresh {folder}: it is not a repository", "Publish into it first."
        )
    with alone(folder / ".lock", f"refresh {folder}"):
        moment = (now or datetime.now(UTC)).replace(microsecond=0)
        snapshot = _read(folder, "timestamp.json", Timestamp).signed.snapshot_meta
        meta = _read(folder, f"{snapshot.version}.snapshot.json", Snapshot).signed.meta
        return _sign_online(folder, meta, keys, moment)[1]


def _check_whole(folder: Path, offer: _Offer) -> None:
    """Nothing is signed that cannot be fetched, whoever had a hand in the folder."""
    for name, entry in offer.entries.items():
        file = folder / "targets" / hashed_name(entry.hashes["sha256"], name)
        if not file.is_file() or file.stat().st_size != entry.length:
            raise OperationError(
                ErrorCode.REPOSITORY_INCOMPLETE,
                f"cannot sign {folder}: {file.name} is not in it any more",
                "Publish again, and let nothing else write into that folder.",
            )


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
    releases = _current_releases(folder)
    if releases is None:
        return None
    entry = releases.signed.targets[MANIFEST_NAME]
    return parse_manifest((folder / "targets" / hashed_name(entry.hashes["sha256"], MANIFEST_NAME)).read_bytes())


def _known_transfers(folder: Path) -> Callable[[str], Transfer | None]:
    """Finds what is offered now and still whole; an image's name is its content, so it holds for the next runtime."""
    releases = _current_releases(folder)
    entries = releases.signed.targets if releases else {}

    def known(name: str) -> Transfer | None:
        if (entry := entries.get(name)) is None:
            return None
        found = parse_transfer(name, entry.length, entry.hashes["sha256"], entry.custom or {})
        return found if found and is_whole(folder / "targets" / hashed_name(found.sha256, name)) else None

    return known


def _sign_all(folder: Path, offer: _Offer, keys: Keys, moment: datetime) -> tuple[int, datetime]:
    version = _next_version(_current_releases(folder), moment)
    releases = Metadata(Targets(version=version, expires=moment + RELEASES_LIFE, targets=offer.entries))
    releases.sign(keys.signer(RELEASES))
    meta = {}
    for role, signed in (("targets", signed_delegation(keys)), (RELEASES, releases)):
        data = signed.to_bytes()
        meta[f"{role}.json"] = _meta(signed.signed.version, data)
        _write(folder / "metadata" / f"{signed.signed.version}.{role}.json", data)
    return _sign_online(folder, meta, keys, moment)


def _sign_online(folder: Path, meta: dict[str, MetaFile], keys: Keys, moment: datetime) -> tuple[int, datetime]:
    # Every version: a board that was away for a year follows the roots one by one.
    for number, root in keys.roots().items():
        _write(folder / "metadata" / f"{number}.root.json", root)
    current = _current(folder, "timestamp", Timestamp)
    version = _next_version(current, moment)
    snapshot = Metadata(Snapshot(version=version, expires=moment + RELEASES_LIFE, meta=meta))
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


def _current_releases(folder: Path) -> Metadata[Targets] | None:
    timestamp = _current(folder, "timestamp", Timestamp)
    if timestamp is None:
        return None
    snapshot = _read(folder, f"{timestamp.signed.snapshot_meta.version}.snapshot.json", Snapshot)
    meta = snapshot.signed.meta.get(f"{RELEASES}.json")
    return _read(folder, f"{meta.version}.{RELEASES}.json", Targets) if meta else None


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
    named = {
        f"{entry['version']}.{name}"
        for path in kept
        for name, entry in json.loads(path.read_bytes())["signed"]["meta"].items()
    }
    alive: set[str] = set()
    for path in [*(folder / "metadata").glob("*.targets.json"), *(folder / "metadata").glob(f"*.{RELEASES}.json")]:
        if path.name in named:
            entries = json.loads(path.read_bytes())["signed"]["targets"]
            alive |= {hashed_name(entry["hashes"]["sha256"], name) for name, entry in entries.items()}
        else:
            doomed.append(path)
    doomed += [path for path in (folder / "targets").iterdir() if path.name not in alive]
    for path in doomed:
        path.unlink()


def _version_of(path: Path) -> int:
    return int(path.name.partition(".")[0])

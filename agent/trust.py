"""What may be believed, and never anything older: the policy around the TUF client.

python-tuf (tuf_client.py) walks the root chain, counts signatures, and checks expiry, versions, hashes and lengths.
This module adds what it leaves open:

- every document is read strictly before it is parsed, and a role may not list one key twice (signed_json.py);
- the versions seen last are kept in a second, durable record, so that a damaged or deleted cache forgets nothing;
- time is never before the newest `built_at` that was signed, so a dead clock accepts no expired metadata; the clock
  itself is never written down, so a wrong one does no lasting harm;
- the manifest must be for this board, and not older than what it runs, unless a downgrade is signed;
- no document is longer than a bound of ours, whatever length is signed for it.

A refresh works on a copy of the cache and replaces it only when everything was accepted: a refused repository leaves
the board's state as it was. The provisioned `root.json` is read and never written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from agent.contract.delta import (
    MANIFEST_NAME,
    RELEASES,
    Transfer,
    delta_name,
    full_name,
    is_sha256,
    parse_transfer,
)
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.linked import LinkedRuntime
from agent.contract.manifest import MAX_MANIFEST_BYTES, Extension, Manifest, parse_manifest, parse_time
from agent.delta.apply import FAULTS
from agent.ports.protocols import Fetched, Fetcher, Progress, Store
from agent.signed_json import read_strictly
from agent.transfer import Base, forget_transfer, run_transfer
from agent.trust_state import (
    ROLES,
    Seen,
    Write,
    copy_sound,
    keep_documents,
    keep_seen,
    load_seen,
    read_anchor,
    scratch,
)
from agent.tuf_client import Documents, Metadata, incomplete, rolled_back, run_client, untrusted

_TRANSFER_FAULTS = FAULTS | {ErrorCode.HASH_MISMATCH, ErrorCode.LENGTH_MISMATCH, ErrorCode.ENTRY_INVALID}


@dataclass(frozen=True, slots=True)
class Trust:
    """What a board knows by itself: where its trust is kept, what it is, what it runs, and the time it believes."""

    folder: Path
    target: str
    arch: str
    active: Callable[[], Manifest | None]
    now: Callable[[], str]
    write: Write  # durable


def open_source(fetcher: Fetcher, trust: Trust, store: Store) -> TufSource:
    """A Source on one repository. Nothing is fetched until it is asked for something; `close` closes the fetcher."""
    return TufSource(fetcher, trust, store)


class TufSource:
    """The Source port: one repository, refreshed and judged once."""

    def __init__(self, fetcher: Fetcher, trust: Trust, store: Store) -> None:
        self._fetcher = fetcher
        self._trust = trust
        self._store = store
        self._manifest: Manifest | None = None
        self._targets: dict[str, Any] = {}

    def manifest(self) -> Manifest:
        """The signed manifest for this board. Every trust decision has been made when this returns."""
        if self._manifest is None:
            self._manifest, self._targets = _refresh(self._fetcher, self._trust)
        return self._manifest

    def moved_bytes(self) -> int:
        """Everything this repository sent so far, metadata included."""
        return self._fetcher.received_bytes()

    def transfer_sizes(self, extension: Extension, held: Sequence[Extension]) -> tuple[int, str | None]:
        """Bytes the cheapest transfer moves, and the base image it needs (None: the full one)."""
        transfer, base = next(self._ways(extension, held))
        return transfer.size_bytes, base.image_id if base else None

    def fetch(self, extension: Extension, held: Sequence[Extension], progress: Progress) -> Fetched:
        """The image is in the store, verified. `held`: images whose bytes were just verified and may serve as base."""
        if self._store.verify_image(extension):
            return Fetched(extension.image_id, "held", None, 0)
        before = self._fetcher.received_bytes()
        note = ""
        for transfer, base in self._ways(extension, held):
            part = self._store.part(extension.image_id)
            try:
                run_transfer(self._fetcher, transfer, self._base(base), part, progress)
                self._store.finish_image(extension)
            except OperationError as error:
                if error.code in _TRANSFER_FAULTS:
                    forget_transfer(part)
                if base is None and error.code is ErrorCode.NOT_FOUND:
                    raise incomplete(error.message) from error
                if base is None or error.code not in (*_TRANSFER_FAULTS, ErrorCode.NOT_FOUND):
                    raise
                note = error.message
                continue
            moved = self._fetcher.received_bytes() - before
            return Fetched(
                extension.image_id, "delta" if base else "full", base.image_id if base else None, moved, note
            )
        raise AssertionError("the full transfer is always the last way")

    def close(self) -> None:
        """The connection is gone."""
        self._fetcher.close()

    def _base(self, extension: Extension | None) -> Base | None:
        if extension is None:
            return None
        path = self._store.image(extension.image_id)
        return Base(path, extension.sha256) if path else None

    def _ways(self, extension: Extension, held: Sequence[Extension]) -> Iterator[tuple[Transfer, Extension | None]]:
        """The transfers that make this image out of what is held, the smallest first; the full one ends the list."""
        self.manifest()
        deltas = [
            (transfer, base)
            for base in held
            if (transfer := self._transfer(delta_name(base.image_id, extension.image_id), extension, base))
        ]
        full = self._transfer(full_name(extension.image_id), extension, None)
        if full is None:
            raise OperationError(
                ErrorCode.REPOSITORY_INCOMPLETE,
                f"cannot fetch image {extension.name} {extension.version}: the repository does not offer it",
                "Publish the runtime again with every image.",
            )
        yield from sorted((way for way in deltas if way[0].size_bytes < full.size_bytes), key=_size)
        yield full, None

    def _transfer(self, name: str, extension: Extension, base: Extension | None) -> Transfer | None:
        entry = self._targets.get(name)
        if entry is None:
            return None
        try:
            found = parse_transfer(name, entry["length"], entry["hashes"]["sha256"], entry.get("custom") or {})
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise untrusted(f"the entry of {name} is false: {cause}", ErrorCode.ENTRY_INVALID) from cause
        if found is None:
            return None
        makes = (found.result_sha256, found.result_size_bytes) == (extension.sha256, extension.size_bytes)
        if not makes or found.base_sha256 != (base.sha256 if base else None):
            raise untrusted(f"the entry of {name} does not make that image", ErrorCode.ENTRY_INVALID)
        return found


def _size(way: tuple[Transfer, Extension | None]) -> int:
    return way[0].size_bytes


def _refresh(fetcher: Fetcher, trust: Trust) -> tuple[Manifest, dict[str, Any]]:
    seen = load_seen(trust.folder)
    anchor = read_anchor(trust.folder)
    moment = max(parse_time(trust.now()), parse_time(seen.built_at))
    cache = trust.folder / "cache"
    with scratch("avocado-trust-") as work:
        copy_sound(cache, work)
        documents = run_client(work, anchor, Metadata(fetcher), moment, seen)
        found = _versions(documents, seen)
        listed = documents[RELEASES]["signed"]["targets"]
        entry = listed.get(MANIFEST_NAME)
        if entry is None:
            raise untrusted("it offers no manifest", ErrorCode.REPOSITORY_INCOMPLETE)
        manifest = _fetch_manifest(fetcher, entry)
        _judge(manifest, trust, _first_expiry(documents), seen)
        found = replace(found, built_at=max(seen.built_at, manifest.built_at))
        # The record before the cache: after a power cut between them the cache is older, never the record.
        keep_seen(trust.folder, found, trust.write)
        keep_documents(work, cache, trust.write)
    return manifest, listed


def _versions(documents: Documents, seen: Seen) -> Seen:
    found = {role: int(documents[role]["signed"]["version"]) for role in ROLES}
    [delegated] = documents["targets"]["signed"]["delegations"]["roles"]
    roles = {**documents["root"]["signed"]["roles"], RELEASES: delegated}
    keys = {role: tuple(sorted(roles[role]["keyids"])) for role in ROLES}
    for role, version in found.items():
        if version < (least := seen.floor(role, keys[role])):
            raise rolled_back(f"{role} version {version}, seen {least}")
    return replace(
        seen,
        root=found["root"],
        timestamp=found["timestamp"],
        snapshot=found["snapshot"],
        targets=found["targets"],
        releases=found[RELEASES],
        keys=keys,
    )


def _fetch_manifest(fetcher: Fetcher, entry: dict[str, Any]) -> Manifest:
    size, sha256 = entry["length"], entry["hashes"].get("sha256", "")
    if not is_sha256(sha256):
        raise untrusted(f"the entry of {MANIFEST_NAME} has no sha256", ErrorCode.ENTRY_INVALID)
    if size > MAX_MANIFEST_BYTES:
        raise untrusted(
            f"its manifest is {size} bytes, at most {MAX_MANIFEST_BYTES} are read", ErrorCode.FETCH_TOO_LARGE
        )
    try:
        data = b"".join(fetcher.get(f"targets/{sha256}.{MANIFEST_NAME}", size, exact=True))
    except OperationError as error:
        if error.code is ErrorCode.NOT_FOUND:
            raise incomplete(error.message) from error
        raise
    if hashlib.sha256(data).hexdigest() != sha256:
        raise OperationError(
            ErrorCode.HASH_MISMATCH,
            f"cannot use {MANIFEST_NAME}: its bytes do not match their signed hash",
            "Deploy again; if it happens again, look at what stands between this board and the repository.",
        )
    read_strictly(data, MANIFEST_NAME, booleans=None)
    return parse_manifest(data)


def _first_expiry(documents: Documents) -> datetime:
    """When the first of the signatures ends, the root's included: nothing signed now was built after that."""
    return min(parse_time(documents[role]["signed"]["expires"]) for role in ROLES)


def _judge(manifest: Manifest, trust: Trust, expires: datetime, seen: Seen) -> None:
    """Whether a signed manifest is for this board, now."""
    if (manifest.target, manifest.arch) != (trust.target, trust.arch):
        raise OperationError(
            ErrorCode.WRONG_TARGET,
            f"cannot deploy runtime {manifest.runtime.name} {manifest.runtime.version}: it is for {manifest.target} "
            f"({manifest.arch}), this board is {trust.target} ({trust.arch})",
            f"Deploy with --target {trust.target}.",
        )
    # It becomes the floor of time: from a publisher's clock in 2100, it would lock this board out for good.
    if parse_time(manifest.built_at) > expires:
        raise untrusted(f"its manifest says it was built at {manifest.built_at}, after its signatures expire")
    active = trust.active()
    built_at = active.built_at if active else ""
    if isinstance(active, LinkedRuntime):
        # Nobody knows its own: the newest that was seen or lies on this board stands in for it.
        built_at = max(seen.built_at, active.newest_known)
    if active and active.id != manifest.id and manifest.built_at < built_at and not manifest.allow_downgrade:
        raise OperationError(
            ErrorCode.DOWNGRADE_REFUSED,
            f"cannot deploy runtime {manifest.runtime.name} {manifest.runtime.version}: it was built at "
            f"{manifest.built_at}, {'the active one' if active.built_at else 'the newest one seen'} at {built_at}",
            "Build it again, or sign it with 'allow_downgrade: true'; to go back, run 'avocadoctl rollback'.",
        )

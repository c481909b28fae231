"""Changes of the keys: a new root version, signed by the keys before and by the keys after, or a new delegation.

A change of root, targets or online keys makes the next version of `root.json` in `next/`, with the private keys that
come with it. It holds once it carries the signatures that the root before it and it itself demand; until then the
folder works as before, and `next/root.json` can be carried from one holder of a root key to the next, each adding
theirs with `keys sign`. Boards follow every version from their own to the newest, so none is left out.

A change of the release signers is the owner's alone: the next `targets.json`, signed by a targets key, holds at once. A
key that is replaced moves to `retired/`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from securesystemslib.signer import Key, SSlibKey
from tuf.api.metadata import Metadata, Root
from tuf.api.serialization import DeserializationError

from agent.contract.delta import RELEASES
from agent.contract.errors import ErrorCode, OperationError
from agent.host.delegation import is_signed, keep_delegation, next_delegation
from agent.host.keys import (
    ROLES,
    ROOT_JSON,
    ROOT_LIFE,
    TARGETS_JSON,
    Keys,
    Trusted,
    check_name,
    keep_root,
    key_named,
    keys_in,
    name_of,
    roles_in,
    roles_of,
    with_name,
)
from agent.host.pkcs11 import read_public

NEXT = "next"
RETIRED = "retired"
_MOST_KEYS_OF_A_ROLE = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a change: whether it holds, and how many root signatures are still missing if not.

    `role`: whose next version it is, root's or targets'. `delegation`: the version of the delegation that was signed
    along with a root.
    """

    role: str
    version: int
    holds: bool
    missing: int
    signed_by: tuple[str, ...]
    delegation: int | None = None


def rotate(keys: Keys, name: str, *, now: datetime | None = None) -> Outcome:
    """A new key takes the place of one. Raises `keys`."""

    def change(trusted: Trusted, folder: Path) -> None:
        old = key_named(trusted, name)
        new = keys.make(folder / f"{name}.pem")
        for role in roles_of(trusted, old.keyid):
            trusted.revoke_key(old.keyid, role)
            trusted.add_key(new, role)

    return _changer(keys, name)(keys, change, now)


def revoke(keys: Keys, name: str, *, threshold: int | None = None, now: datetime | None = None) -> Outcome:
    """A key counts no more. Raises `keys` when too few would be left: that key has to be rotated."""

    def change(trusted: Trusted, folder: Path) -> None:
        old = key_named(trusted, name)
        for role in roles_of(trusted, old.keyid):
            trusted.revoke_key(old.keyid, role)
            _demand(trusted, role, threshold)

    return _changer(keys, name)(keys, change, now)


def add(
    keys: Keys,
    group: str,
    name: str,
    *,
    public: Path | None = None,
    uri: str | None = None,
    threshold: int | None = None,
    now: datetime | None = None,
) -> Outcome:
    """One more key for `root`, `targets`, `releases` or `online`: made here, or its public half, or a token's."""

    check_name(name)  # before it becomes a file's

    if any(key.name == name for key in keys.list()):
        raise OperationError(ErrorCode.KEYS, f"cannot add key {name}: there is one", "avocadoctl keys list")

    def change(trusted: Trusted, folder: Path) -> None:
        key = _public(keys, folder, name, public, uri)
        for role in ROLES[group]:
            trusted.add_key(key, role)
            _demand(trusted, role, threshold)

    return (_change_signers if group == RELEASES else _change_root)(keys, change, now)


def sign(keys: Keys, *, now: datetime | None = None) -> Outcome:
    """Sign a pending change with the root keys here; without one, renew root and delegation, each where its key is."""
    if (keys.folder / NEXT).exists():
        return _settle(keys, _pending(keys), now)
    if not _is_owner_here(keys):
        return _change_root(keys, _as_it_is, now)
    if not _can_sign(keys, "root"):
        return _change_signers(keys, _as_it_is, now)
    outcome = _change_root(keys, _as_it_is, now)
    return replace(outcome, delegation=_change_signers(keys, _as_it_is, now).version) if outcome.holds else outcome


def drop(keys: Keys) -> None:
    """The pending change, and the keys made for it, are gone."""
    shutil.rmtree(keys.folder / NEXT, ignore_errors=True)


_Change = Callable[[Trusted, Path], None]


def _as_it_is(trusted: Trusted, folder: Path) -> None:
    """The next version with the same keys."""


def _changer(keys: Keys, name: str) -> Callable[[Keys, _Change, datetime | None], Outcome]:
    """What changes the document that names this key. Raises `keys`."""
    signs = {key.name: key.roles for key in keys.list()}
    if name not in signs:
        known = ", ".join(sorted(signs))
        raise OperationError(ErrorCode.KEYS, f"cannot find key {name}: there are {known}", "avocadoctl keys list")
    return _change_signers if RELEASES in signs[name] else _change_root


def _change_root(keys: Keys, change: _Change, now: datetime | None) -> Outcome:
    root = keys.root().signed
    root.version += 1
    root.expires = (now or datetime.now(UTC)).replace(microsecond=0) + ROOT_LIFE
    with _next_folder(keys) as folder:
        change(root, folder)
        return _settle(keys, Metadata(root), now)


def _change_signers(keys: Keys, change: _Change, now: datetime | None) -> Outcome:
    before = keys.delegation().signed
    with _next_folder(keys) as folder:
        signed = next_delegation(keys, lambda targets: change(targets, folder), now)
        _move_keys(keys, before, signed.signed)
        keep_delegation(keys, signed)
        shutil.rmtree(folder)
    root = keys.root().signed
    by = tuple(name_of(root, key_id) for key_id in signed.signatures)
    return Outcome("targets", signed.signed.version, holds=True, missing=0, signed_by=by)


def _can_sign(keys: Keys, role: str) -> bool:
    root = keys.root().signed
    return any(keys.is_here(name_of(root, key_id)) for key_id in root.roles[role].keyids)


def _is_owner_here(keys: Keys) -> bool:
    return (keys.folder / TARGETS_JSON).exists() and _can_sign(keys, "targets")


@contextmanager
def _next_folder(keys: Keys) -> Iterator[Path]:
    folder = keys.folder / NEXT
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError as cause:
        raise OperationError(
            ErrorCode.KEYS,
            f"cannot change the keys in {keys.folder}: another change still waits for signatures",
            "Finish it with 'avocadoctl keys sign', or drop it with 'avocadoctl keys sign --drop'.",
        ) from cause
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # nothing has been told to anybody
        raise


def _settle(keys: Keys, signed: Metadata[Root], now: datetime | None) -> Outcome:
    """Sign with every root key that is here, of the root before and of this one; keep it when that is enough."""
    before, after = keys.root().signed, signed.signed
    folder = keys.folder / NEXT
    for root in (before, after):
        for key_id in root.roles["root"].keyids:
            name = name_of(root, key_id)
            fresh = key_id not in before.keys and (folder / f"{name}.pem").exists()
            if fresh or (key_id in before.keys and keys.is_here(name)):
                signer = keys.signer_of(name, root.keys[key_id], folder if fresh else None)
                signed.sign(signer, append=True)
    missing = max(_missing(signed, root) for root in (before, after))
    known = {**before.keys, **after.keys}
    by = tuple(
        sorted(name_of(before if key in before.keys else after, key) for key in signed.signatures if key in known)
    )
    if missing:
        (folder / ROOT_JSON).write_bytes(signed.to_bytes())
        return Outcome("root", after.version, holds=False, missing=missing, signed_by=by)
    _move_keys(keys, before, after)
    keep_root(keys.folder, signed)
    shutil.rmtree(folder)
    outcome = Outcome("root", after.version, holds=True, missing=0, signed_by=by)
    if _is_owner_here(keys) and not is_signed(keys):  # the key that had signed it was replaced
        outcome = replace(outcome, delegation=_change_signers(keys, _as_it_is, now).version)
    return outcome


def _missing(signed: Metadata[Root], by: Root) -> int:
    result = by.get_verification_result("root", signed.signed_bytes, signed.signatures)
    return max(0, result.threshold - len(result.signed))


def _move_keys(keys: Keys, before: Trusted, after: Trusted) -> None:
    """What is replaced moves to `retired/`, what is new to its place."""
    for key_id in keys_in(before).keys() - keys_in(after).keys():
        name = name_of(before, key_id)
        for path in (keys.folder / f"{name}.pem", keys.folder / f"{name}.uri"):
            if path.exists():
                (keys.folder / RETIRED).mkdir(mode=0o700, exist_ok=True)
                path.replace(keys.folder / RETIRED / f"{name}-{key_id[:8]}{path.suffix}")
    folder = keys.folder / NEXT
    for path in [*folder.glob("*.pem"), *folder.glob("*.uri")]:
        path.replace(keys.folder / path.name)


def _pending(keys: Keys) -> Metadata[Root]:
    path = keys.folder / NEXT / ROOT_JSON
    try:
        signed = Metadata[Root].from_bytes(path.read_bytes())
    except (OSError, DeserializationError) as cause:
        raise OperationError(
            ErrorCode.KEYS,
            f"cannot sign {path}: it does not read",
            "Drop this change with 'avocadoctl keys sign --drop', and make it again.",
        ) from cause
    if signed.signed.version != keys.root().signed.version + 1:
        raise OperationError(
            ErrorCode.KEYS,
            f"cannot sign {path}: it is version {signed.signed.version}, and {keys.root().signed.version} is current",
            "Drop this change with 'avocadoctl keys sign --drop', and make it again.",
        )
    return signed


def _public(keys: Keys, folder: Path, name: str, public: Path | None, uri: str | None) -> Key:
    if uri is not None:
        key = with_name(read_public(uri), name)
        (folder / f"{name}.uri").write_text(uri + "\n", encoding="utf-8")
        return key
    if public is None:
        return keys.make(folder / f"{name}.pem")
    try:
        loaded = load_pem_public_key(public.read_bytes())
    except (OSError, ValueError) as cause:
        raise OperationError(ErrorCode.KEYS, f"cannot read a public key from {public}: {cause}") from cause
    if not isinstance(loaded, Ed25519PublicKey):
        raise OperationError(ErrorCode.KEYS, f"cannot use {public}: it is not an ed25519 key")
    return with_name(SSlibKey.from_crypto(loaded), name)


def _demand(trusted: Trusted, role: str, threshold: int | None) -> None:
    found = roles_in(trusted)[role]
    if threshold is not None and role == "root":
        found.threshold = threshold
    if not 1 <= found.threshold <= len(found.keyids) <= _MOST_KEYS_OF_A_ROLE:
        raise OperationError(
            ErrorCode.KEYS,
            f"cannot leave {role} with {len(found.keyids)} keys: {found.threshold} must sign",
            "Rotate the key instead, add another one first, or lower the threshold.",
        )

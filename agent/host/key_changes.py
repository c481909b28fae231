"""Changes of the keys: a new root version, signed by the keys before and by the keys after.

Every change makes the next version of `root.json` in `next/`, with the private keys that come with it. It holds once it
carries the signatures that the root before it and it itself demand; until then the folder works as before, and
`next/root.json` can be carried from one holder of a root key to the next, each adding theirs with `keys sign`. Boards
follow every version from their own to the newest, so none is left out. A key that is replaced moves to `retired/`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from securesystemslib.signer import Key, SSlibKey
from tuf.api.metadata import Metadata, Root
from tuf.api.serialization import DeserializationError

from agent.contract.errors import ErrorCode, OperationError
from agent.host.keys import ROLES, ROOT_JSON, ROOT_LIFE, Keys, check_name, keep_root, key_named, name_of, with_name
from agent.host.pkcs11 import read_public

NEXT = "next"
RETIRED = "retired"
_MOST_KEYS_OF_A_ROLE = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a change: whether it holds, and how many signatures of which are still missing if not."""

    version: int
    holds: bool
    missing: int
    signed_by: tuple[str, ...]


def rotate(keys: Keys, name: str, *, now: datetime | None = None) -> Outcome:
    """A new key takes the place of one. Raises `keys`."""

    def change(root: Root, folder: Path) -> None:
        old = key_named(root, name)
        new = keys.make(folder / f"{name}.pem")
        for role in [role for role, found in root.roles.items() if old.keyid in found.keyids]:
            root.revoke_key(old.keyid, role)
            root.add_key(new, role)

    return _change(keys, change, now)


def revoke(keys: Keys, name: str, *, threshold: int | None = None, now: datetime | None = None) -> Outcome:
    """A key counts no more. Raises `keys` when too few would be left: that key has to be rotated."""

    def change(root: Root, folder: Path) -> None:
        old = key_named(root, name)
        for role in [role for role, found in root.roles.items() if old.keyid in found.keyids]:
            root.revoke_key(old.keyid, role)
            _demand(root, role, threshold)

    return _change(keys, change, now)


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
    """One more key for `root`, `targets` (releases) or `online`: made here, or its public half, or a token's."""

    check_name(name)  # before it becomes a file's

    def change(root: Root, folder: Path) -> None:
        if any(name_of(root, key_id) == name for key_id in root.keys):
            raise OperationError(ErrorCode.KEYS, f"cannot add key {name}: there is one", "avocadoctl keys list")
        key = _public(keys, folder, name, public, uri)
        for role in ROLES[group]:
            root.add_key(key, role)
            _demand(root, role, threshold)

    return _change(keys, change, now)


def sign(keys: Keys, *, now: datetime | None = None) -> Outcome:
    """Add the signatures of the root keys that are here: to the pending change, else to a renewed root."""
    if (keys.folder / NEXT).exists():
        return _settle(keys, _pending(keys))
    return _change(keys, lambda root, folder: None, now)


def drop(keys: Keys) -> None:
    """The pending change, and the keys made for it, are gone."""
    shutil.rmtree(keys.folder / NEXT, ignore_errors=True)


def _change(keys: Keys, change: Callable[[Root, Path], None], now: datetime | None) -> Outcome:
    root = keys.root().signed
    root.version += 1
    root.expires = (now or datetime.now(UTC)).replace(microsecond=0) + ROOT_LIFE
    with _next_folder(keys) as folder:
        change(root, folder)
        return _settle(keys, Metadata(root))


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


def _settle(keys: Keys, signed: Metadata[Root]) -> Outcome:
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
        return Outcome(after.version, holds=False, missing=missing, signed_by=by)
    _retire(keys, before, after)
    for path in [*folder.glob("*.pem"), *folder.glob("*.uri")]:
        path.replace(keys.folder / path.name)
    keep_root(keys.folder, signed)
    shutil.rmtree(folder)
    return Outcome(after.version, holds=True, missing=0, signed_by=by)


def _missing(signed: Metadata[Root], by: Root) -> int:
    result = by.get_verification_result("root", signed.signed_bytes, signed.signatures)
    return max(0, result.threshold - len(result.signed))


def _retire(keys: Keys, before: Root, after: Root) -> None:
    for key_id in before.keys.keys() - after.keys.keys():
        name = name_of(before, key_id)
        for path in (keys.folder / f"{name}.pem", keys.folder / f"{name}.uri"):
            if path.exists():
                (keys.folder / RETIRED).mkdir(mode=0o700, exist_ok=True)
                path.replace(keys.folder / RETIRED / f"{name}-{key_id[:8]}{path.suffix}")


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


def _demand(root: Root, role: str, threshold: int | None) -> None:
    found = root.roles[role]
    if threshold is not None and role == "root":
        found.threshold = threshold
    if not 1 <= found.threshold <= len(found.keyids) <= _MOST_KEYS_OF_A_ROLE:
        raise OperationError(
            ErrorCode.KEYS,
            f"cannot leave {role} with {len(found.keyids)} keys: {found.threshold} must sign",
            "Rotate the key instead, add another one first, or lower the threshold.",
        )

"""The signing keys of a project: ed25519, encrypted at rest, never readable by others.

A keys folder holds `root.json`, the signed list of who may sign what, which boards are provisioned with; `roots/`, all
its versions, by which a board that was away follows from its own to the newest; `targets.json`, the owner's signed list
of who may sign releases (delegation.py); and for each key `<name>.pem`, its private half, or `<name>.uri`, which says
where else that is kept (pkcs11.py). After `keys init` these are `root.pem` (offline: signs who the others are),
`targets.pem` (the owner's: signs who releases), `releases.pem` (signs what a board may run) and `online.pem` (signs
snapshot and timestamp, and is all that `publish --refresh` needs). The first two can leave the machine: publishing does
not need them. A private key without a passphrase is made only when that was asked for. Changing keys is key_changes.py.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.signer import CryptoSigner, Key, Signer
from tuf.api.metadata import Metadata, Role, Root, Targets
from tuf.api.serialization import DeserializationError

from agent.contract.delta import RELEASES
from agent.contract.errors import ErrorCode, OperationError
from agent.host.pkcs11 import open_uri

PASSPHRASE_VARIABLE = "AVOCADO_KEYS_PASSPHRASE"  # noqa: S105 (a variable's name)
ROOT_JSON = "root.json"
TARGETS_JSON = "targets.json"
ROOTS = "roots"
ROOT_LIFE = timedelta(days=365)
# Which key file signs which roles.
ROLES: Mapping[str, tuple[str, ...]] = {
    "root": ("root",),
    "targets": ("targets",),
    RELEASES: (RELEASES,),
    "online": ("snapshot", "timestamp"),
}
# A field of each key in root.json and targets.json: the name of its file here.
NAME_FIELD = "x-avocado-name"
_NAME = re.compile(r"\A[a-z0-9][a-z0-9-]{0,31}\Z")


# A document that names keys: the root, or the owner's delegation.
Trusted = Root | Targets


@dataclass(frozen=True, slots=True)
class KeyFile:
    """A key as `keys list` shows it."""

    name: str
    roles: tuple[str, ...]
    key_id: str
    present: bool
    encrypted: bool
    place: str  # "file", "uri" or "elsewhere"


class Keys:
    """A keys folder. Private keys are read only when something is signed with them."""

    def __init__(self, folder: Path, passphrase: bytes | None = None) -> None:
        self.folder = folder
        self._passphrase = passphrase
        self._signers: dict[tuple[Path, str], Signer] = {}

    def root_bytes(self) -> bytes:
        """The signed root: what boards are provisioned with. Raises `keys`."""
        try:
            return (self.folder / ROOT_JSON).read_bytes()
        except FileNotFoundError as cause:
            raise OperationError(
                ErrorCode.KEYS,
                f"cannot use the keys in {self.folder}: there is no {ROOT_JSON}",
                "Make keys first: avocadoctl keys init",
            ) from cause

    def root(self) -> Metadata[Root]:
        """The signed root, parsed. Raises `keys`."""
        try:
            return Metadata[Root].from_bytes(self.root_bytes())
        except DeserializationError as cause:
            raise OperationError(
                ErrorCode.KEYS, f"cannot use {self.folder / ROOT_JSON}: it is not signed root metadata"
            ) from cause

    def delegation(self) -> Metadata[Targets]:
        """The owner's list of who may sign releases, parsed. Raises `keys`."""
        path = self.folder / TARGETS_JSON
        try:
            found = Metadata[Targets].from_bytes(path.read_bytes())
        except FileNotFoundError as cause:
            raise OperationError(
                ErrorCode.KEYS,
                f"cannot use the keys in {self.folder}: there is no {TARGETS_JSON}",
                "Copy it from the folder that holds the targets key.",
            ) from cause
        except DeserializationError as cause:
            raise OperationError(ErrorCode.KEYS, f"cannot use {path}: it is not signed targets metadata") from cause
        return found

    def roots(self) -> dict[int, bytes]:
        """Every version of the root that is kept here, the current one included. Raises `keys`."""
        found = {self.root().signed.version: self.root_bytes()}
        for path in (self.folder / ROOTS).glob("*.root.json"):
            found.setdefault(int(path.name.partition(".")[0]), path.read_bytes())
        return found

    def signer(self, role: str) -> Signer:
        """A signer of a role. Raises `keys` when no private key is here, or it is locked, or readable by others."""
        trusted = self.delegation().signed if role == RELEASES else self.root().signed
        names = [name_of(trusted, key_id) for key_id in roles_in(trusted)[role].keyids]
        name = next((name for name in names if self.is_here(name)), names[0])
        return self.signer_of(name, key_named(trusted, name))

    def signer_of(self, name: str, key: Key, folder: Path | None = None) -> Signer:
        """The signer of one key. Raises `keys`, also when the private half is not that key's."""
        private, uri = ((folder or self.folder) / f"{name}{suffix}" for suffix in (".pem", ".uri"))
        known = (private, key.keyid)
        if known not in self._signers:
            if not private.exists() and uri.exists():
                self._signers[known] = open_uri(uri, key, self._passphrase)
            else:
                self._signers[known] = CryptoSigner(_read_private(private, self._passphrase))
        signer = self._signers[known]
        if signer.public_key.keyval != key.keyval:
            raise OperationError(
                ErrorCode.KEYS,
                f"cannot sign with {private}: it is not the key that is trusted under that name",
                f"Put the private half of key {key.keyid[:16]} there, or rotate it: avocadoctl keys rotate {name}",
            )
        return signer

    def is_here(self, name: str) -> bool:
        """Whether this folder can sign with a key, by itself or by what its .uri names."""
        return any((self.folder / f"{name}{suffix}").exists() for suffix in (".pem", ".uri"))

    def list(self) -> list[KeyFile]:
        """Every key that root.json names, and targets.json where there is one."""
        documents: tuple[Trusted, ...] = (self.root().signed,)
        if (self.folder / TARGETS_JSON).exists():
            documents += (self.delegation().signed,)
        found = []
        for trusted, key_id in ((document, key_id) for document in documents for key_id in keys_in(document)):
            name = name_of(trusted, key_id)
            path = self.folder / f"{name}.pem"
            encrypted = path.exists() and b"ENCRYPTED" in path.read_bytes()
            place = "file" if path.exists() else "uri" if self.is_here(name) else "elsewhere"
            found.append(KeyFile(name, roles_of(trusted, key_id), key_id, place != "elsewhere", encrypted, place))
        return sorted(found, key=lambda key: (_ORDER.index(key.roles[0]), key.name))

    def make(self, path: Path) -> Key:
        """A new private key in a new file, locked with this folder's passphrase; its public half. Raises `keys`."""
        signer = CryptoSigner(Ed25519PrivateKey.generate())
        write_new(path, _locked(signer, self._passphrase), 0o600)
        return with_name(signer.public_key, path.stem)


_ORDER = ("root", "targets", RELEASES, "snapshot", "timestamp")


def keys_in(trusted: Trusted) -> dict[str, Key]:
    """The keys that a document names, by id."""
    if isinstance(trusted, Root):
        return trusted.keys
    return trusted.delegations.keys if trusted.delegations else {}


def roles_in(trusted: Trusted) -> Mapping[str, Role]:
    """The roles that a document gives keys to."""
    if isinstance(trusted, Root):
        return trusted.roles
    return (trusted.delegations and trusted.delegations.roles) or {}


def roles_of(trusted: Trusted, key_id: str) -> tuple[str, ...]:
    """What a key may sign."""
    return tuple(name for name, role in roles_in(trusted).items() if key_id in role.keyids)


def name_of(trusted: Trusted, key_id: str) -> str:
    """What a key is called here."""
    name = keys_in(trusted)[key_id].unrecognized_fields.get(NAME_FIELD)
    if isinstance(name, str) and _NAME.match(name):  # it becomes a file's name
        return name
    signs = roles_of(trusted, key_id)
    return next(name for name, roles in ROLES.items() if roles[0] in signs)


def key_named(trusted: Trusted, name: str) -> Key:
    """The key of that name, which the document has."""
    return next(key for key_id, key in keys_in(trusted).items() if name_of(trusted, key_id) == name)


def with_name(key: Key, name: str) -> Key:
    """The key, with its name noted in the signed root. Raises `keys` for a name that is no file's name."""
    check_name(name)
    key.unrecognized_fields[NAME_FIELD] = name
    return key


def check_name(name: str) -> None:
    """Raises `keys` for a name that is no file's name."""
    if not _NAME.match(name):
        raise OperationError(
            ErrorCode.KEYS, f"cannot name a key {name!r}", "Use lower-case letters, digits and dashes, 32 at most."
        )


def keep_root(folder: Path, signed: Metadata[Root]) -> None:
    """The signed root becomes the current one; every version stays."""
    (folder / ROOTS).mkdir(exist_ok=True)
    data = signed.to_bytes()
    for path in (folder / ROOTS / f"{signed.signed.version}.root.json", folder / ROOT_JSON):
        replace_file(path, data)


def replace_file(path: Path, data: bytes) -> None:
    """A public file, whole, in place of the one before."""
    part = path.with_name(f".{path.name}.new")
    part.unlink(missing_ok=True)
    write_new(part, data, 0o644)
    part.replace(path)


def find_passphrase(
    environment: Mapping[str, str], file: Path | None, *, without: bool, needed: bool = True
) -> bytes | None:
    """The passphrase from a file or the environment; None with `without`, or when none is `needed`. Raises `keys`."""
    if without:
        return None
    if file is not None:
        try:
            return file.read_bytes().rstrip(b"\r\n")
        except OSError as cause:
            raise OperationError(ErrorCode.KEYS, f"cannot read the passphrase from {file}: {cause.strerror}") from cause
    if value := environment.get(PASSPHRASE_VARIABLE):
        return value.encode()
    if not needed:
        return None
    raise OperationError(
        ErrorCode.KEYS,
        "cannot protect the keys: there is no passphrase",
        f"Set {PASSPHRASE_VARIABLE}, or give --passphrase-file FILE, or say --no-passphrase.",
    )


def _locked(signer: CryptoSigner, passphrase: bytes | None) -> bytes:
    lock: Any = serialization.NoEncryption()
    if passphrase is not None:
        lock = serialization.BestAvailableEncryption(passphrase)
    private = serialization.load_pem_private_key(signer.private_bytes, None)
    return private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)


def write_new(path: Path, data: bytes, mode: int) -> None:
    """A file that was not there before, on disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read_private(path: Path, passphrase: bytes | None) -> Ed25519PrivateKey:
    try:
        data = path.read_bytes()
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as cause:
        raise OperationError(ErrorCode.KEYS, f"cannot sign with {path}: {cause.strerror}") from cause
    if mode & 0o077:
        raise OperationError(
            ErrorCode.KEYS,
            f"cannot sign with {path}: its mode {mode:04o} lets others read it",
            f"Run: chmod 600 {path}",
        )
    encrypted = b"ENCRYPTED" in data
    if encrypted and passphrase is None:
        raise OperationError(
            ErrorCode.KEYS,
            f"cannot sign with {path}: it is locked and there is no passphrase",
            f"Set {PASSPHRASE_VARIABLE} or give --passphrase-file FILE.",
        )
    try:
        key = serialization.load_pem_private_key(data, passphrase if encrypted else None)
    except ValueError as cause:
        why = "the passphrase is wrong" if encrypted else "it is not a private key"
        raise OperationError(ErrorCode.KEYS, f"cannot sign with {path}: {why}") from cause
    if not isinstance(key, Ed25519PrivateKey):
        raise OperationError(ErrorCode.KEYS, f"cannot sign with {path}: it is not an ed25519 key")
    return key

"""The signing keys of a project: ed25519, encrypted at rest, never readable by others.

A keys folder holds `root.pem` (offline: signs who the others are), `targets.pem` (signs what a board may run),
`online.pem` (signs snapshot and timestamp, and is all that `publish --refresh` needs), and `root.json`, the signed list
of the public halves that boards are provisioned with. After `keys init` the root key can leave the machine: publishing
does not need it. A private key without a passphrase is made only when that was asked for.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, Root
from tuf.api.serialization import DeserializationError

from agent.contract.errors import ErrorCode, OperationError

PASSPHRASE_VARIABLE = "AVOCADO_KEYS_PASSPHRASE"  # noqa: S105 (a variable's name)
ROOT_JSON = "root.json"
ROOT_LIFE = timedelta(days=365)
# Which key file signs which roles.
ROLES: Mapping[str, tuple[str, ...]] = {
    "root": ("root",),
    "targets": ("targets",),
    "online": ("snapshot", "timestamp"),
}
_LEAST_PASSPHRASE = 8


@dataclass(frozen=True, slots=True)
class KeyFile:
    """A key as `keys list` shows it."""

    name: str
    roles: tuple[str, ...]
    key_id: str
    present: bool
    encrypted: bool


class Keys:
    """A keys folder. Private keys are read only when something is signed with them."""

    def __init__(self, folder: Path, passphrase: bytes | None = None) -> None:
        self.folder = folder
        self._passphrase = passphrase
        self._signers: dict[str, CryptoSigner] = {}

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

    def signer(self, role: str) -> CryptoSigner:
        """The signer of a role. Raises `keys` when the private key is absent, locked, or readable by others."""
        name = next(name for name, roles in ROLES.items() if role in roles)
        if name not in self._signers:
            self._signers[name] = CryptoSigner(_read_private(self._private(name), self._passphrase))
        return self._signers[name]

    def list(self) -> list[KeyFile]:
        """Every key that root.json names."""
        root = self.root().signed
        found = []
        for name, roles in ROLES.items():
            path = self._private(name)
            encrypted = path.exists() and b"ENCRYPTED" in path.read_bytes()
            found.append(KeyFile(name, roles, root.roles[roles[0]].keyids[0], path.exists(), encrypted))
        return found

    def _private(self, name: str) -> Path:
        return self.folder / f"{name}.pem"


def init_keys(folder: Path, passphrase: bytes | None, *, now: datetime | None = None) -> Keys:
    """Make all keys and the first signed root. Raises `keys` when there are some already: they are never replaced."""
    taken = [path.name for path in folder.glob("*.pem")] + [path.name for path in folder.glob(ROOT_JSON)]
    if taken:
        raise OperationError(
            ErrorCode.KEYS,
            f"cannot make keys in {folder}: it already holds {', '.join(sorted(taken))}",
            "Name another folder; boards trust the keys they were provisioned with.",
        )
    if passphrase is not None and len(passphrase) < _LEAST_PASSPHRASE:
        raise OperationError(
            ErrorCode.KEYS, f"cannot use this passphrase: it is shorter than {_LEAST_PASSPHRASE} characters"
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    signers = {name: CryptoSigner(Ed25519PrivateKey.generate()) for name in ROLES}
    moment = (now or datetime.now(UTC)).replace(microsecond=0)
    root = Root(version=1, expires=moment + ROOT_LIFE, consistent_snapshot=True)
    for name, roles in ROLES.items():
        for role in roles:
            root.add_key(signers[name].public_key, role)
    signed = Metadata(root)
    signed.sign(signers["root"])
    for name, signer in signers.items():
        _write_new(folder / f"{name}.pem", _locked(signer, passphrase), 0o600)
    _write_new(folder / ROOT_JSON, signed.to_bytes(), 0o644)
    return Keys(folder, passphrase)


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


def _write_new(path: Path, data: bytes, mode: int) -> None:
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

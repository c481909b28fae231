"""A board's state folder, a project's keys and a repository: enough for a deploy up to the fetched image."""

from __future__ import annotations

import hashlib
import json
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from securesystemslib.formats import encode_canonical
from securesystemslib.signer import CryptoSigner, Signer

from agent.contract.errors import OperationError
from agent.contract.manifest import Extension, Manifest, RuntimeName, image_id
from agent.host.first_keys import init_keys
from agent.host.keys import Keys
from agent.host.repository import publish
from agent.ports.fetch import HttpFetcher, Limits
from agent.ports.files import FileStore, write_durably
from agent.trust import Trust, TufSource, open_source
from tests.hostile.server import Server

QUICK = Limits(connect_s=5, window_s=1.0, window_bytes=512, answer_s=5.0, slice_s=0.05)
BUILT_AT = "2026-11-01T10:00:00Z"
PUBLISHED = datetime(2026, 11, 1, 12, tzinfo=UTC)
NOW = "2026-11-02T00:00:00Z"


@cache
def image(number: int, size: int = 40_000) -> bytes:
    """Image 1 differs from image 0 in every byte by a little, as retrained weights do."""
    base = random.Random(7).randbytes(size)
    return bytes((byte + (number * index) % 3) % 256 for index, byte in enumerate(base)) if number else base


def extension(data: bytes, name: str = "pose-model") -> Extension:
    sha256 = hashlib.sha256(data).hexdigest()
    return Extension(
        name=name, version="1", image_id=image_id(sha256), sha256=sha256, size_bytes=len(data), types=["sysext"]
    )


def manifest(data: bytes, *, built_at: str = BUILT_AT, target: str = "virtual", **more: Any) -> Manifest:
    return Manifest(
        manifest_version=1,
        id=str(uuid.uuid5(uuid.NAMESPACE_OID, f"{built_at}{hashlib.sha256(data).hexdigest()}")),
        built_at=built_at,
        runtime=RuntimeName(name="pose", version="2"),
        extensions=[extension(data)],
        target=target,
        arch="x86_64",
        **more,
    )


@dataclass
class Stage:
    """Everything of one case. `repository` is what the server serves; `state` is the board's."""

    folder: Path
    clock: str = NOW
    active: Manifest | None = None
    keys: Keys = field(init=False)
    server: Server = field(init=False)  # serves `repository`
    sources: list[TufSource] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)  # what the board paused, slice by slice, in no time

    def __post_init__(self) -> None:
        self.keys = init_keys(self.folder / "keys", None, now=PUBLISHED)
        self.state = self.folder / "state"
        self.repository = self.folder / "repository"
        (self.state / "metadata").mkdir(parents=True)
        (self.state / "metadata" / "root.json").write_bytes(self.keys.root_bytes())
        self.store = FileStore(self.state)

    def publish(self, data: bytes, *, bases: list[bytes] = [], at: datetime = PUBLISHED, **more: Any) -> Manifest:  # noqa: B006
        offered = manifest(data, **more)
        files = []
        for number, content in enumerate([data, *bases]):
            path = self.folder / f"image-{number}"
            path.write_bytes(content)
            files.append(path)
        image_id = offered.extensions[0].image_id
        publish(self.repository, offered, {image_id: files[0]}, {image_id: files[1:]}, self.keys, now=at)
        return offered

    def hold(self, data: bytes) -> Extension:
        held = extension(data)
        self.store.part(held.image_id).write_bytes(data)
        self.store.finish_image(held)
        return held

    def source(self, url: str, **options: Any) -> TufSource:
        trust = Trust(
            self.state / "metadata", "virtual", "x86_64", lambda: self.active, lambda: self.clock, write_durably
        )
        options = {"limits": QUICK, "sleep": self.slept.append, **options}
        source = open_source(HttpFetcher(url, **options), trust, self.store)
        self.sources.append(source)
        return source

    def close(self) -> None:
        for source in self.sources:
            source.close()

    def signed_by(self, role: str, document: dict[str, Any], signers: list[Signer] | None = None) -> bytes:
        """The document, correctly signed, however odd it is."""
        data = encode_canonical(document).encode()
        signatures = [
            {"keyid": signer.public_key.keyid, "sig": signer.sign(data).signature}
            for signer in signers or [self.keys.signer(role)]
        ]
        return json.dumps({"signatures": signatures, "signed": document}).encode()

    def edit(self, role: str, change: Callable[[dict[str, Any]], None], signers: list[Signer] | None = None) -> None:
        """Change one role's document and sign it, and everything above it, again."""
        path = self.path_of(role)
        document = json.loads(path.read_bytes())["signed"]
        change(document)
        self.put(role, self.signed_by(role, document, signers))

    def put(self, role: str, data: bytes) -> None:
        """These bytes in a role's place, with the roles above it signed to match them."""
        self.path_of(role).write_bytes(data)
        above = {"releases": "snapshot", "targets": "snapshot", "snapshot": "timestamp"}.get(role)
        if above:
            pinned = {"length": len(data), "hashes": {"sha256": hashlib.sha256(data).hexdigest()}}
            self.edit(above, lambda document: document["meta"][f"{role}.json"].update(pinned))

    def path_of(self, role: str) -> Path:
        metadata = self.repository / "metadata"
        if role == "timestamp":
            return metadata / "timestamp.json"
        if role == "root":
            return metadata / "1.root.json"
        timestamp = json.loads((metadata / "timestamp.json").read_bytes())["signed"]
        version = timestamp["meta"]["snapshot.json"]["version"]
        if role in ("targets", "releases"):
            snapshot = json.loads((metadata / f"{version}.snapshot.json").read_bytes())["signed"]
            version = snapshot["meta"][f"{role}.json"]["version"]
        return metadata / f"{version}.{role}.json"

    def entry(self, suffix: str) -> dict[str, Any]:
        """The signed entry of the target whose name ends so."""
        targets = json.loads(self.path_of("releases").read_bytes())["signed"]["targets"]
        found: dict[str, Any] = targets[self.target_named(suffix)]
        return found

    def target_named(self, suffix: str) -> str:
        """The name of the signed target that ends so."""
        targets = json.loads(self.path_of("releases").read_bytes())["signed"]["targets"]
        return next(name for name in targets if name.endswith(suffix))

    def target_file(self, suffix: str) -> Path:
        return next(path for path in (self.repository / "targets").iterdir() if path.name.endswith(suffix))

    def snapshot(self) -> dict[str, tuple[int, bytes]]:
        """Every file of the board's state: mode and bytes."""
        found = {}
        for path in sorted(self.state.rglob("*")):
            content = bytes(path.readlink()) if path.is_symlink() else b"" if path.is_dir() else path.read_bytes()
            found[str(path.relative_to(self.state))] = (path.lstat().st_mode, content)
        return found


def stranger() -> CryptoSigner:
    """A key nobody here trusts."""
    return CryptoSigner(Ed25519PrivateKey.generate())


def later(days: int) -> datetime:
    return PUBLISHED + timedelta(days=days)


def refused(call: Callable[[], object]) -> OperationError:
    try:
        call()
    except OperationError as error:
        return error
    raise AssertionError("it was accepted")

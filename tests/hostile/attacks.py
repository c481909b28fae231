"""The ways an attacker's hand is laid on a repository, from which the cases are put together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from securesystemslib.signer import Signer

from tests.hostile.board import Stage, image, later, stranger
from tests.hostile.case import Attack
from tests.hostile.server import Rule

NEWER_BUILD = "2026-11-01T11:00:00Z"
Change = Callable[[dict[str, Any]], object]


def edited(role: str, change: Change) -> Attack:
    """A document changed by whoever holds its keys."""
    return lambda stage: stage.edit(role, change)


def signed_by_a_stranger(role: str) -> Attack:
    """A document signed with a key nobody here trusts; everything above it is honest."""
    return lambda stage: stage.edit(role, lambda signed: None, [stranger()])


def signed_by(role: str, *others: str) -> Attack:
    """A document signed with other roles' keys."""
    return lambda stage: stage.edit(role, lambda signed: None, [stage.keys.signer(other) for other in others])


def raw(role: str, old: bytes, new: bytes) -> Attack:
    """Bytes of a document replaced as text; the signature stays the honest one."""

    def attack(stage: Stage) -> None:
        data = stage.path_of(role).read_bytes()
        assert old in data, f"{old!r} is not in {role}"
        stage.put(role, data.replace(old, new, 1))

    return attack


def swapped_bytes(role: str, old: bytes, new: bytes) -> Attack:
    """Bytes replaced in the file alone: nothing above it is signed anew."""

    def attack(stage: Stage) -> None:
        path = stage.path_of(role)
        assert old in path.read_bytes()
        path.write_bytes(path.read_bytes().replace(old, new, 1))

    return attack


def instead(role: str, other: str) -> Attack:
    """Another role's honest document in a role's place."""
    return lambda stage: stage.put(role, stage.path_of(other).read_bytes())


def padded(role: str, data: bytes) -> Attack:
    """Bytes behind the end of a document; white space is signed alike, since it is not part of it."""
    return lambda stage: stage.put(role, stage.path_of(role).read_bytes() + data)


def next_root(change: Change, *, version: int = 2, signers: list[Signer] | None = None) -> Attack:
    """The next root, changed, signed with the board's root key or by whoever is named."""

    def attack(stage: Stage) -> None:
        document = json.loads(stage.path_of("root").read_bytes())["signed"]
        document["version"] = version
        change(document)
        data = stage.signed_by("root", document, signers)
        (stage.repository / "metadata" / "2.root.json").write_bytes(data)

    return attack


def republished(then: Attack) -> Attack:
    """An honest newer publication first, so that the board looks at every role again."""

    def attack(stage: Stage) -> None:
        stage.publish(image(1), at=later(1), built_at=NEWER_BUILD)
        then(stage)

    return attack


def removed(pattern: str) -> Attack:
    """Files of the repository are not there."""

    def attack(stage: Stage) -> None:
        found = list(stage.repository.glob(pattern))
        assert found
        for path in found:
            path.unlink()

    return attack


def clock(text: str) -> Attack:
    """The board's clock says this."""

    def attack(stage: Stage) -> None:
        stage.clock = text

    return attack


def answered(part: str, rule: Rule) -> Attack:
    """The server does something else for paths that hold `part`."""

    def attack(stage: Stage) -> None:
        stage.server.rules[part] = rule

    return attack


def manifest_replaced(old: bytes, new: bytes) -> Attack:
    """The manifest changed and its entry signed again: the work of a release key."""

    def attack(stage: Stage) -> None:
        data = stage.target_file(".manifest.json").read_bytes()
        assert old in data
        offer_manifest(stage, data.replace(old, new, 1))

    return attack


def offer_manifest(stage: Stage, data: bytes) -> None:
    """These bytes as the manifest, under a true signature."""
    sha256 = hashlib.sha256(data).hexdigest()
    (stage.repository / "targets" / f"{sha256}.manifest.json").write_bytes(data)
    entry = {"length": len(data), "hashes": {"sha256": sha256}}
    stage.edit("releases", lambda signed: signed["targets"].update({"manifest.json": entry}))


def entry_changed(change: Change) -> Attack:
    """The signed entry of the image's full transfer, changed by a release key."""

    def edit(signed: dict[str, Any]) -> None:
        name = next(name for name in signed["targets"] if name.endswith(".full"))
        change(signed["targets"][name])

    return edited("releases", edit)

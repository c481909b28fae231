"""Keys change: boards follow from any version, and what an attacker did with a stolen key is undone by its rotation."""

from __future__ import annotations

import json
import shutil

import pytest

from agent.contract.errors import ErrorCode
from agent.host.key_changes import add, revoke, rotate, sign
from agent.host.keys import Keys
from agent.host.repository import publish, refresh
from tests.hostile.board import PUBLISHED, Stage, image, later, manifest, refused
from tests.hostile.server import Server

BUILT_LATER = "2026-11-02T10:00:00Z"


def anchor(stage: Stage, version: int) -> None:
    """The board was provisioned when this root was the newest."""
    shutil.rmtree(stage.state / "metadata" / "cache", ignore_errors=True)
    (stage.state / "metadata" / "root.json").write_bytes(stage.keys.roots()[version])


@pytest.mark.parametrize("provisioned_with", [1, 2, 3, 4, 5])
def test_a_board_follows_root_rotations_from_any_earlier_version(
    stage: Stage, server: Server, provisioned_with: int
) -> None:
    stage.publish(image(0))
    for name in ("root", "online", "releases", "root", "targets"):
        assert rotate(stage.keys, name, now=PUBLISHED).holds
    offered = stage.publish(image(1), at=later(1), built_at=BUILT_LATER)
    anchor(stage, provisioned_with)
    assert stage.source(server.url).manifest() == offered
    seen = json.loads((stage.state / "metadata" / "seen.json").read_bytes())
    assert seen["root"] == 5


def test_a_repository_made_anew_still_carries_every_root(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    rotate(stage.keys, "root", now=PUBLISHED)
    rotate(stage.keys, "root", now=PUBLISHED)
    shutil.rmtree(stage.repository)
    offered = stage.publish(image(1), at=later(1), built_at=BUILT_LATER)
    anchor(stage, 1)
    assert stage.source(server.url).manifest() == offered


def test_a_root_chain_with_a_hole_leaves_the_board_with_what_it_trusts(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    rotate(stage.keys, "online", now=PUBLISHED)
    rotate(stage.keys, "root", now=PUBLISHED)
    stage.publish(image(1), at=later(1), built_at=BUILT_LATER)
    (stage.repository / "metadata" / "2.root.json").unlink()
    before = stage.snapshot()
    error = refused(stage.source(server.url).manifest)
    assert (error.code, error.message) == (
        ErrorCode.SIGNATURE_INVALID,
        "cannot trust the repository: timestamp was signed by 0/1 keys",
    )
    assert stage.snapshot() == before


@pytest.mark.parametrize("stolen", ["online", "targets", "releases"])
def test_a_revoked_key_signs_nothing_that_a_board_accepts(stage: Stage, server: Server, stolen: str) -> None:
    stage.publish(image(0))
    role = {"online": "timestamp"}.get(stolen, stolen)
    thief = stage.keys.signer(role)
    rotate(stage.keys, stolen, now=PUBLISHED)
    stage.publish(image(1), at=later(1), built_at=BUILT_LATER)
    # Even with everything above it signed honestly.
    stage.edit(role, lambda signed: None, [thief])
    before = stage.snapshot()
    error = refused(stage.source(server.url).manifest)
    assert (error.code, error.message) == (
        ErrorCode.SIGNATURE_INVALID,
        f"cannot trust the repository: {role} was signed by 0/1 keys",
    )
    assert stage.snapshot() == before


def test_a_fast_forward_with_a_stolen_online_key_ends_with_its_rotation(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    honest = stage.folder / "honest"
    shutil.copytree(stage.repository, honest)
    stage.edit("timestamp", lambda signed: signed.update(version=(1 << 53) - 1))
    stage.source(server.url).manifest()
    # Now no ordinary version counts as newer.
    shutil.rmtree(stage.repository)
    shutil.copytree(honest, stage.repository)
    offered = stage.publish(image(1), at=later(1), built_at=BUILT_LATER)
    assert refused(stage.source(server.url).manifest).code is ErrorCode.ROLLBACK_REFUSED
    rotate(stage.keys, "online", now=PUBLISHED)
    stage.publish(image(1), at=later(1), built_at=BUILT_LATER)
    assert stage.source(server.url).manifest() == offered
    # What the old key signed does not come back.
    shutil.rmtree(stage.repository)
    shutil.copytree(honest, stage.repository)
    assert refused(stage.source(server.url).manifest).code in (
        ErrorCode.SIGNATURE_INVALID,
        ErrorCode.ROLLBACK_REFUSED,
    )


def test_a_revoked_release_signer_among_others_resets_no_version(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    old = stage.folder / "old"
    shutil.copytree(stage.repository, old)
    add(stage.keys, "releases", "ci", now=PUBLISHED)
    stage.publish(image(1), at=later(1), built_at=BUILT_LATER)
    stage.source(server.url).manifest()
    revoke(stage.keys, "ci", now=PUBLISHED)
    stage.publish(image(1), at=later(1), built_at=BUILT_LATER)
    shutil.rmtree(stage.repository)
    shutil.copytree(old, stage.repository)
    assert refused(stage.source(server.url).manifest).code is ErrorCode.ROLLBACK_REFUSED


def test_a_root_that_one_of_two_holders_signed_is_refused(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    add(stage.keys, "root", "second", threshold=2, now=PUBLISHED)
    stage.publish(image(0), at=later(1))
    stage.source(server.url).manifest()
    document = json.loads(stage.keys.root_bytes())
    document["signed"]["version"] = 3
    forged = stage.signed_by("root", document["signed"], [stage.keys.signer("root")])
    (stage.repository / "metadata" / "3.root.json").write_bytes(forged)
    before = stage.snapshot()
    error = refused(stage.source(server.url).manifest)
    assert (error.code, error.message) == (
        ErrorCode.THRESHOLD_UNMET,
        "cannot trust the repository: root was signed by 1/2 keys",
    )
    assert stage.snapshot() == before


def test_the_online_key_alone_keeps_a_repository_fresh(stage: Stage, server: Server) -> None:
    offered = stage.publish(image(0))
    for path in (stage.folder / "keys").glob("*.pem"):
        if path.name != "online.pem":
            path.unlink()
    # Six days later the timestamp is renewed; after thirteen it is still good.
    keys = Keys(stage.folder / "keys")
    refresh(stage.repository, keys, now=later(6))
    stage.clock = "2026-11-13T00:00:00Z"
    assert stage.source(server.url).manifest() == offered
    # A new publication needs the release key.
    error = refused(lambda: publish(stage.repository, manifest(image(1)), {}, {}, keys, only=()))
    assert error.message == f"cannot sign with {stage.folder / 'keys' / 'releases.pem'}: No such file or directory"


def test_a_release_key_and_the_online_key_publish_without_root_or_targets_key(stage: Stage, server: Server) -> None:
    for name in ("root.pem", "targets.pem"):
        (stage.folder / "keys" / name).unlink()
    offered = stage.publish(image(0))
    assert stage.source(server.url).manifest() == offered


def test_the_owner_adds_and_revokes_release_signers_without_the_root_key(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    (stage.folder / "keys" / "root.pem").unlink()
    add(stage.keys, "releases", "ci", now=PUBLISHED)
    revoke(stage.keys, "releases", now=PUBLISHED)
    offered = stage.publish(image(1), at=later(1), built_at=BUILT_LATER)
    assert stage.source(server.url).manifest() == offered


def test_a_delegation_that_the_root_no_longer_trusts_is_not_published(stage: Stage) -> None:
    stage.publish(image(0))
    old = (stage.folder / "keys" / "targets.json").read_bytes()
    rotate(stage.keys, "targets", now=PUBLISHED)
    (stage.folder / "keys" / "targets.json").write_bytes(old)
    before = (stage.repository / "metadata" / "timestamp.json").read_bytes()
    error = refused(lambda: stage.publish(image(1), at=later(1), built_at=BUILT_LATER))
    assert (error.message, error.remedy) == (
        f"cannot publish: no key that signs targets has signed {stage.folder / 'keys' / 'targets.json'}",
        "Run 'avocadoctl keys sign' where the targets key is, and copy targets.json from there.",
    )
    assert (stage.repository / "metadata" / "timestamp.json").read_bytes() == before


def test_a_fast_forward_of_the_releases_ends_with_the_rotation_of_both_stolen_keys(
    stage: Stage, server: Server
) -> None:
    stage.publish(image(0))
    stage.edit("releases", lambda signed: signed.update(version=(1 << 53) - 1))
    metadata = stage.repository / "metadata"
    data = stage.path_of("releases").read_bytes()
    stage.edit("snapshot", lambda signed: signed["meta"]["releases.json"].update(version=(1 << 53) - 1))
    (metadata / f"{(1 << 53) - 1}.releases.json").write_bytes(data)
    stage.source(server.url).manifest()
    shutil.rmtree(stage.repository)
    rotate(stage.keys, "online", now=PUBLISHED)
    stage.publish(image(1), at=later(1), built_at=BUILT_LATER)
    assert refused(stage.source(server.url).manifest).code is ErrorCode.ROLLBACK_REFUSED
    rotate(stage.keys, "releases", now=PUBLISHED)
    offered = stage.publish(image(1), at=later(1), built_at=BUILT_LATER)
    assert stage.source(server.url).manifest() == offered


def test_an_expired_root_is_renewed_by_a_newer_one(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    year_later = later(366)
    stage.clock = "2027-11-03T00:00:00Z"
    offered = stage.publish(image(1), at=year_later, built_at="2027-11-02T10:00:00Z")
    error = refused(stage.source(server.url).manifest)
    assert error.message == ("cannot trust the repository: its root is expired (it is 2027-11-03T00:00:00Z here)")
    sign(stage.keys, now=year_later)
    stage.publish(image(1), at=year_later, built_at="2027-11-02T10:00:00Z")
    assert stage.source(server.url).manifest() == offered

"""The cases of the TUF conformance suite, by the names of the specification's attacks, against the board's client.

The suite itself is not in the package registry, so its cases are rebuilt here from the specification's client workflow
(version 1.0, section 5); the number in each case is the clause that refuses it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from agent.contract.errors import ErrorCode
from agent.host.key_changes import add, rotate
from tests.hostile.board import PUBLISHED, Stage, image, later, refused, stranger
from tests.hostile.server import Server

INVALID, UNSIGNED = ErrorCode.METADATA_INVALID, ErrorCode.SIGNATURE_INVALID
EXPIRED, OLDER = ErrorCode.METADATA_EXPIRED, ErrorCode.ROLLBACK_REFUSED
FAILED = ErrorCode.FETCH_FAILED
NEWER_BUILD = "2026-11-01T11:00:00Z"

Attack = Callable[[Stage], None]


@dataclass(frozen=True)
class Case:
    """`attack` follows an honest refresh when the board is to know something already."""

    clause: str
    attack: Attack
    code: ErrorCode
    message: str
    knows: bool = False


def root(change: Callable[[dict[str, Any]], object], *, signers: str = "both", version: int = 2) -> Attack:
    """The next root, changed, signed with the board's root key (or by nobody it knows)."""

    def attack(stage: Stage) -> None:
        document = json.loads(stage.path_of("root").read_bytes())["signed"]
        document["version"] = version
        change(document)
        by = None if signers == "both" else [stranger()]
        data = stage.signed_by("root", document, by)
        (stage.repository / "metadata" / f"{version}.root.json").write_bytes(data)

    return attack


def edited(role: str, change: Callable[[dict[str, Any]], object]) -> Attack:
    return lambda stage: stage.edit(role, change)


def republished(then: Attack) -> Attack:
    """An honest newer publication first, so that the board looks at every role again."""

    def attack(stage: Stage) -> None:
        stage.publish(image(1), at=later(1), built_at=NEWER_BUILD)
        then(stage)

    return attack


def instead(role: str, other: str) -> Attack:
    """Another role's honest document in a role's place."""
    return lambda stage: stage.put(role, stage.path_of(other).read_bytes())


def padded(role: str, count: int) -> Attack:
    """So many bytes of white space behind a document: signed alike, since they are not part of it."""
    return lambda stage: stage.put(role, stage.path_of(role).read_bytes() + b" " * count)


def twice_signed(role: str) -> Attack:
    def attack(stage: Stage) -> None:
        path = stage.path_of(role)
        document = json.loads(path.read_bytes())
        document["signatures"] *= 2
        stage.put(role, json.dumps(document).encode())

    return attack


def threshold_of_two(stage: Stage) -> None:
    """The root asks for two release signatures, and the publisher gives one."""
    add(stage.keys, "targets", "second", now=PUBLISHED)
    document = json.loads(stage.keys.root_bytes())["signed"]
    document["roles"]["targets"]["threshold"] = 2
    (stage.repository / "metadata" / "2.root.json").write_bytes(stage.signed_by("root", document))


def same_signature_twice_for_two(stage: Stage) -> None:
    threshold_of_two(stage)
    signer = stage.keys.signer("targets")
    stage.edit("targets", lambda signed: None, [signer, signer])


def hidden(pattern: str) -> Attack:
    def attack(stage: Stage) -> None:
        for path in (stage.repository / "metadata").glob(pattern):
            path.unlink()

    return attack


def delegated(stage: Stage) -> None:
    """A release key hands on what it was trusted with."""
    signer = stranger()
    key = {"keytype": "ed25519", "scheme": "ed25519", "keyval": signer.public_key.keyval}
    role = {"name": "bin", "keyids": [signer.public_key.keyid], "threshold": 1, "terminating": True, "paths": ["*"]}

    def change(signed: dict[str, Any]) -> None:
        entry = signed["targets"].pop("manifest.json")
        signed["delegations"] = {"keys": {signer.public_key.keyid: key}, "roles": [role]}
        document = {**signed, "targets": {"manifest.json": entry}}
        document.pop("delegations")
        data = stage.signed_by("targets", document, [signer])
        (stage.repository / "metadata" / f"{signed['version']}.bin.json").write_bytes(data)

    stage.edit("targets", change)


def no_root_keys(signed: dict[str, Any]) -> None:
    signed["roles"]["root"]["keyids"] = []


CASES: dict[str, Case] = {
    "root: arbitrary software attack, signed by nobody the board knows": Case(
        "5.3.4", root(lambda signed: None, signers="strangers"), UNSIGNED, "root was signed by 0/1 keys"
    ),
    "root: no keys left": Case("5.3.4", root(no_root_keys), UNSIGNED, "root was signed by 0/1 keys"),
    "root: a threshold of nothing": Case(
        "5.3.4",
        root(lambda signed: signed["roles"]["root"].update(threshold=0)),
        INVALID,
        "2.root.json does not read (threshold should be at least 1!)",
    ),
    "root: the version is the one before": Case(
        "5.3.5", root(lambda signed: signed.update(version=1)), OLDER, "Expected root version 2 instead got version 1"
    ),
    "root: the version skips one": Case(
        "5.3.5", root(lambda signed: signed.update(version=3)), OLDER, "Expected root version 2 instead got version 3"
    ),
    "root: expired": Case(
        "5.3.10",
        root(lambda signed: signed.update(expires="2026-11-01T23:00:00Z")),
        EXPIRED,
        "Final root.json is expired",
    ),
    "root: another role's document": Case(
        "5.3.3",
        root(lambda signed: signed.update(_type="targets")),
        INVALID,
        "2.root.json does not read (there is no 'targets')",
    ),
    "root: without a role": Case(
        "5.3.3",
        root(lambda signed: signed["roles"].pop("snapshot")),
        INVALID,
        "2.root.json does not read (Role names must be the top-level metadata roles)",
    ),
    "timestamp: not there": Case("5.4.1", hidden("timestamp.json"), FAILED, "the server answers 404"),
    "timestamp: endless data": Case(
        "5.4.1", padded("timestamp", 20_000), ErrorCode.FETCH_TOO_LARGE, "at most 16384 are expected"
    ),
    "timestamp: signed by nobody the board knows": Case(
        "5.4.2",
        lambda stage: stage.edit("timestamp", lambda signed: None, [stranger()]),
        UNSIGNED,
        "timestamp was signed by 0/1 keys",
    ),
    "timestamp: signed by the release key": Case(
        "5.4.2",
        lambda stage: stage.edit("timestamp", lambda signed: None, [stage.keys.signer("targets")]),
        UNSIGNED,
        "timestamp was signed by 0/1 keys",
    ),
    "timestamp: rollback of its version": Case(
        "5.4.3.1",
        edited("timestamp", lambda signed: signed.update(version=signed["version"] - 1)),
        OLDER,
        "must be >=",
        knows=True,
    ),
    "timestamp: rollback of the snapshot it names": Case(
        "5.4.3.2",
        edited(
            "timestamp",
            lambda signed: (
                signed.update(version=signed["version"] + 1),
                signed["meta"]["snapshot.json"].update(version=1),
            ),
        ),
        OLDER,
        "must be >=",
        knows=True,
    ),
    "timestamp: indefinite freeze": Case(
        "5.4.4",
        edited("timestamp", lambda signed: signed.update(expires="2026-11-01T23:00:00Z")),
        EXPIRED,
        "timestamp.json is expired",
    ),
    "timestamp: another role's document": Case(
        "5.4.2", instead("timestamp", "snapshot"), INVALID, "Expected 'timestamp', got 'snapshot'"
    ),
    "timestamp: names no snapshot": Case(
        "5.4.2",
        edited("timestamp", lambda signed: signed.update(meta={})),
        INVALID,
        "timestamp.json does not read (there is no 'snapshot.json')",
    ),
    "snapshot: not there": Case("5.5.1", hidden("*.snapshot.json"), FAILED, "the server answers 404"),
    "snapshot: longer than the timestamp says": Case(
        "5.5.1",
        lambda stage: stage.path_of("snapshot").write_bytes(stage.path_of("snapshot").read_bytes() + b" "),
        ErrorCode.FETCH_TOO_LARGE,
        "are expected",
    ),
    "snapshot: another content than the timestamp says": Case(
        "5.5.2",
        lambda stage: stage.path_of("snapshot").write_bytes(
            stage.path_of("snapshot").read_bytes().replace(b"2027", b"2028")
        ),
        INVALID,
        "does not match expected hash",
    ),
    "snapshot: signed by nobody the board knows": Case(
        "5.5.3",
        lambda stage: stage.edit("snapshot", lambda signed: None, [stranger()]),
        UNSIGNED,
        "snapshot was signed by 0/1 keys",
    ),
    "snapshot: another version than the timestamp says": Case(
        "5.5.4",
        edited("snapshot", lambda signed: signed.update(version=signed["version"] + 5)),
        OLDER,
        "Expected snapshot version",
    ),
    "snapshot: rollback of the targets it names": Case(
        "5.5.5",
        republished(edited("snapshot", lambda signed: signed["meta"]["targets.json"].update(version=1))),
        OLDER,
        "Expected targets.json version",
        knows=True,
    ),
    "snapshot: the targets it named are gone": Case(
        "5.5.5",
        republished(edited("snapshot", lambda signed: signed.update(meta={"x.json": signed["meta"]["targets.json"]}))),
        INVALID,
        "New snapshot is missing info for 'targets.json'",
        knows=True,
    ),
    "snapshot: expired": Case(
        "5.5.6",
        edited("snapshot", lambda signed: signed.update(expires="2026-11-01T23:00:00Z")),
        EXPIRED,
        "snapshot.json is expired",
    ),
    "targets: not there": Case("5.6.1", hidden("*.targets.json"), FAILED, "the server answers 404"),
    "targets: mix and match": Case(
        "5.6.2",
        lambda stage: stage.path_of("targets").write_bytes(
            stage.path_of("targets").read_bytes().replace(b"2027", b"2028")
        ),
        INVALID,
        "does not match expected hash",
    ),
    "targets: signed by nobody the board knows": Case(
        "5.6.3",
        lambda stage: stage.edit("targets", lambda signed: None, [stranger()]),
        UNSIGNED,
        "targets was signed by 0/1 keys",
    ),
    "targets: fewer signatures than the root asks for": Case(
        "5.6.3", threshold_of_two, UNSIGNED, "targets was signed by 1/2 keys"
    ),
    "targets: one signature twice for a threshold of two": Case(
        "5.6.3",
        same_signature_twice_for_two,
        INVALID,
        "targets.json does not read (Multiple signatures found for keyid ",
    ),
    "targets: another version than the snapshot says": Case(
        "5.6.4",
        edited("targets", lambda signed: signed.update(version=signed["version"] + 5)),
        OLDER,
        "Expected targets v",
    ),
    "targets: expired": Case(
        "5.6.5",
        edited("targets", lambda signed: signed.update(expires="2026-11-01T23:00:00Z")),
        EXPIRED,
        "New targets is expired",
    ),
    "targets: another role's document": Case(
        "5.6.3", instead("targets", "snapshot"), INVALID, "Expected 'targets', got 'snapshot'"
    ),
    "targets: a swapped delegation": Case("5.6.7", delegated, INVALID, "it offers no manifest"),
    "any: garbage after the end": Case(
        "4.2",
        lambda stage: stage.put("timestamp", stage.path_of("timestamp").read_bytes() + b"{}"),
        INVALID,
        "Extra data",
    ),
    "any: one signature listed twice": Case(
        "4.2", twice_signed("timestamp"), INVALID, "timestamp.json does not read (Multiple signatures found for keyid "
    ),
    "any: a specification of another age": Case(
        "4.3",
        edited("timestamp", lambda signed: signed.update(spec_version="2.0.0")),
        INVALID,
        "timestamp.json does not read (Unsupported spec_version 2.0.0)",
    ),
    "any: no version": Case(
        "4.3",
        edited("timestamp", lambda signed: signed.pop("version")),
        INVALID,
        "timestamp.json does not read (there is no 'version')",
    ),
    "any: a version below one": Case(
        "4.3",
        edited("timestamp", lambda signed: signed.update(version=0)),
        INVALID,
        "timestamp.json does not read (version must be > 0, got 0)",
    ),
    "any: a date that is none": Case(
        "4.3",
        edited("timestamp", lambda signed: signed.update(expires="tomorrow")),
        INVALID,
        "timestamp.json does not read (time data 'tomorrow' does not match format",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_board_refuses_and_stays_as_it_was(stage: Stage, server: Server, name: str) -> None:
    case = CASES[name]
    stage.publish(image(0))
    if case.knows:
        stage.source(server.url).manifest()
    case.attack(stage)
    before = stage.snapshot()
    error = refused(stage.source(server.url).manifest)
    assert (error.code, case.message in error.message) == (case.code, True), error.message
    assert error.message.startswith("cannot ")
    assert error.message.count("\n") == 0
    assert stage.snapshot() == before
    assert len(server.asked) < 20


def test_a_replayed_timestamp_is_refused_once_a_newer_one_was_seen(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    old = stage.path_of("timestamp").read_bytes()
    stage.publish(image(1), at=later(1), built_at=NEWER_BUILD)
    stage.clock = "2026-11-03T00:00:00Z"
    stage.source(server.url).manifest()
    stage.path_of("timestamp").write_bytes(old)
    before = stage.snapshot()
    assert refused(stage.source(server.url).manifest).code is OLDER
    assert stage.snapshot() == before


def test_the_same_timestamp_again_asks_for_nothing_more(stage: Stage, server: Server) -> None:
    offered = stage.publish(image(0))
    stage.source(server.url).manifest()
    server.asked.clear()
    assert stage.source(server.url).manifest() == offered
    asked = [path for path, _ in server.asked]
    assert asked[:2] == ["/metadata/2.root.json", "/metadata/timestamp.json"]
    assert not any("snapshot" in path or "targets.json" in path for path in asked)


def test_a_root_chain_without_an_end_is_given_up(stage: Stage, server: Server) -> None:
    """5.3.3: at most so many rotations at a time; the rest is for the next refresh."""
    stage.publish(image(0))
    for _ in range(70):
        rotate(stage.keys, "online", now=PUBLISHED)
    stage.publish(image(1), at=later(1), built_at=NEWER_BUILD)
    before = stage.snapshot()
    error = refused(stage.source(server.url).manifest)
    assert error.code is UNSIGNED
    assert sum("root.json" in path for path, _ in server.asked) == 64
    assert stage.snapshot() == before


def test_expired_documents_in_the_cache_still_count_against_a_rollback(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    old = stage.folder / "old"
    shutil.copytree(stage.repository, old)
    stage.publish(image(1), at=later(1), built_at=NEWER_BUILD)
    stage.source(server.url).manifest()
    shutil.rmtree(stage.repository)
    shutil.copytree(old, stage.repository)
    # Months later the cache has expired; the thief of the online key has signed the old snapshot afresh.
    stage.clock = "2026-12-20T00:00:00Z"
    stage.edit("timestamp", lambda signed: signed.update(expires="2027-01-01T00:00:00Z"))
    assert refused(stage.source(server.url).manifest).code is OLDER

"""Signed by nobody, by too few, by the wrong ones, or by one who is counted twice."""

from __future__ import annotations

import json
from typing import Any

from agent.contract.errors import ErrorCode
from agent.host.key_changes import add, rotate
from tests.hostile.attacks import next_root, republished, signed_by, signed_by_a_stranger
from tests.hostile.board import PUBLISHED, Stage, stranger
from tests.hostile.case import Case

OWN_KEYS = "Publish with the keys this board was provisioned with."
OTHERS = "Have the other holders of that role's keys sign it too."
UNSIGNED, FEW = ErrorCode.SIGNATURE_INVALID, ErrorCode.THRESHOLD_UNMET


def threshold_of_two(stage: Stage) -> None:
    """The root asks for two signatures of the delegation, and the owner gives one."""
    add(stage.keys, "targets", "second", now=PUBLISHED)
    document = json.loads(stage.keys.root_bytes())["signed"]
    document["roles"]["targets"]["threshold"] = 2
    (stage.repository / "metadata" / "2.root.json").write_bytes(stage.signed_by("root", document))


def same_signature_twice_for_two(stage: Stage) -> None:
    threshold_of_two(stage)
    signer = stage.keys.signer("targets")
    stage.edit("targets", lambda signed: None, [signer, signer])


def twice_signed(stage: Stage) -> None:
    document = json.loads(stage.path_of("timestamp").read_bytes())
    document["signatures"] *= 2
    stage.put("timestamp", json.dumps(document).encode())


def one_key_under_two_ids(signed: dict[str, Any]) -> None:
    role = signed["roles"]["targets"]
    key = json.loads(json.dumps(signed["keys"][role["keyids"][0]]))
    key["keyval"]["public"] = key["keyval"]["public"].upper()
    signed["keys"]["0" * 64] = key
    role["keyids"].append("0" * 64)
    role["threshold"] = 2


def one_of_two_root_holders(stage: Stage) -> None:
    add(stage.keys, "root", "second", threshold=2, now=PUBLISHED)
    document = json.loads(stage.keys.root_bytes())["signed"]
    document["version"] = 3
    metadata = stage.repository / "metadata"
    (metadata / "2.root.json").write_bytes(stage.keys.root_bytes())
    (metadata / "3.root.json").write_bytes(stage.signed_by("root", document, [stage.keys.signer("root")]))


def endless_roots(stage: Stage) -> None:
    """More rotations than are followed at a time; the online key of the last one signs."""
    for _ in range(70):
        rotate(stage.keys, "online", now=PUBLISHED)
    republished(lambda stage: None)(stage)


def without_signatures(stage: Stage) -> None:
    document = json.loads(stage.path_of("timestamp").read_bytes())
    stage.put("timestamp", json.dumps({**document, "signatures": []}).encode())


def signature_of_other_bytes(stage: Stage) -> None:
    document = json.loads(stage.path_of("timestamp").read_bytes())
    document["signed"]["version"] += 1
    stage.put("timestamp", json.dumps(document).encode())


def unsigned(role: str, have: str = "0/1") -> str:
    return f"cannot trust the repository: {role} was signed by {have} keys"


CASES = {
    "root rotated by strangers": Case(
        by="mirror", clause="5.3.4", attack=next_root(lambda signed: None, signers=[stranger()]),
        code=UNSIGNED, message=unsigned("root"), remedy=OWN_KEYS,
    ),
    "root that leaves itself no keys": Case(
        by="root thief", clause="5.3.4", attack=next_root(lambda signed: signed["roles"]["root"].update(keyids=[])),
        code=UNSIGNED, message=unsigned("root"), remedy=OWN_KEYS,
    ),
    "root that asks for no signatures": Case(
        by="root thief", clause="5.3.4", attack=next_root(lambda signed: signed["roles"]["root"].update(threshold=0)),
        code=ErrorCode.METADATA_INVALID,
        message="cannot trust the repository: 2.root.json does not read (threshold should be at least 1!)",
    ),
    "root signed by one of two holders": Case(
        by="root thief", clause="5.3.4", attack=one_of_two_root_holders,
        code=FEW, message=unsigned("root", "1/2"), remedy=OTHERS,
    ),
    "root chain without an end": Case(
        by="root thief", clause="5.3.3", attack=endless_roots,
        code=UNSIGNED, message=unsigned("timestamp"), remedy=OWN_KEYS,
    ),
    "one key under two ids": Case(
        by="root thief", clause="5.3.4", attack=next_root(one_key_under_two_ids),
        code=ErrorCode.KEY_COUNTED_TWICE,
        message="cannot trust 2.root.json: signed.roles.targets: '{targets_key16}' and '0000000000000000' are one key, "
        "which counts once",
    ),
    "arbitrary software: targets signed by a stranger": Case(
        by="mirror", clause="5.6.3", attack=signed_by_a_stranger("targets"),
        code=UNSIGNED, message=unsigned("targets"), remedy=OWN_KEYS,
    ),
    "targets signed by the online key": Case(
        by="online thief", clause="5.6.3", attack=signed_by("targets", "timestamp"),
        code=UNSIGNED, message=unsigned("targets"), remedy=OWN_KEYS,
    ),
    "targets signed by one of two holders": Case(
        by="owner thief", clause="5.6.3", attack=threshold_of_two,
        code=FEW, message=unsigned("targets", "1/2"), remedy=OTHERS,
    ),
    "one signature twice for a threshold of two": Case(
        by="owner thief", clause="5.6.3", attack=same_signature_twice_for_two,
        code=ErrorCode.METADATA_INVALID,
        message="cannot trust the repository: {targets} does not read (Multiple signatures found for keyid "
        "{targets_key})",
    ),
    "snapshot signed by a stranger": Case(
        by="mirror", clause="5.5.3", attack=signed_by_a_stranger("snapshot"),
        code=UNSIGNED, message=unsigned("snapshot"), remedy=OWN_KEYS,
    ),
    "timestamp signed by a stranger": Case(
        by="mirror", clause="5.4.2", attack=signed_by_a_stranger("timestamp"),
        code=UNSIGNED, message=unsigned("timestamp"), remedy=OWN_KEYS,
    ),
    "timestamp signed by the release key": Case(
        by="release thief", clause="5.4.2", attack=signed_by("timestamp", "releases"),
        code=UNSIGNED, message=unsigned("timestamp"), remedy=OWN_KEYS,
    ),
    "timestamp signed by nobody": Case(
        by="mirror", clause="5.4.2", attack=without_signatures,
        code=UNSIGNED, message=unsigned("timestamp"), remedy=OWN_KEYS,
    ),
    "timestamp changed under its signature": Case(
        by="mirror", clause="5.4.2", attack=signature_of_other_bytes,
        code=UNSIGNED, message=unsigned("timestamp"), remedy=OWN_KEYS,
    ),
    "one signature listed twice": Case(
        by="mirror", clause="4.2", attack=twice_signed,
        code=ErrorCode.METADATA_INVALID,
        message="cannot trust the repository: timestamp.json does not read (Multiple signatures found for keyid "
        "{online_key})",
    ),
}  # fmt: skip

"""Who may list what a board runs: more than the releases, for more than a repository holds, or handed on."""

from __future__ import annotations

import json
import shutil
from typing import Any

from agent.contract.errors import ErrorCode
from agent.host.key_changes import add
from tests.hostile.attacks import (
    NEWER_BUILD,
    Change,
    edited,
    instead,
    removed,
    republished,
    signed_by,
    signed_by_a_stranger,
    swapped_bytes,
)
from tests.hostile.board import PUBLISHED, Stage, image, later, stranger
from tests.hostile.case import Attack, Case
from tests.hostile.cases.freshness import AGAIN, NEWER, NEXT, SOON, VERSION, expired, older
from tests.hostile.cases.mixtures import INCOMPLETE, MIXED, WHOLE, not_named, not_there
from tests.hostile.cases.servers import flood
from tests.hostile.cases.signatures import FEW, OTHERS, OWN_KEYS, UNSIGNED, unsigned

REFUSED = ErrorCode.DELEGATION_REFUSED
PATHS = "manifest.json, *.full, *.delta"


def the_role(change: Change) -> Attack:
    """The one delegated role, changed by the owner's key."""
    return edited("targets", lambda signed: change(signed["delegations"]["roles"][0]))


def refused_delegation(attack: Attack, why: str, by: str = "owner thief") -> Case:
    return Case(
        by=by, clause="5.6.7", attack=attack, code=REFUSED, message=f"cannot trust the repository: its {why}"
    )  # fmt: skip


def many_roles(count: int) -> Attack:
    """Each is a copy of the honest one under another name."""

    def change(signed: dict[str, Any]) -> None:
        roles = signed["delegations"]["roles"]
        roles += [{**roles[0], "name": f"more-{number}"} for number in range(count - 1)]

    return edited("targets", change)


def swapped_for_another_role(stage: Stage) -> None:
    """The owner's key trusts a stranger, under a name of their own, with everything."""
    signer = stranger()
    key_id = signer.public_key.keyid
    role = {"name": "bin", "keyids": [key_id], "threshold": 1, "terminating": True, "paths": ["*"]}
    delegations = {"keys": {key_id: signer.public_key.to_dict()}, "roles": [role]}
    stage.edit("targets", lambda signed: signed.update(delegations=delegations))


def handed_on(name: str) -> Attack:
    """A release key hands on what it was trusted with."""

    def change(signed: dict[str, Any]) -> None:
        signer = stranger()
        key_id = signer.public_key.keyid
        role = {"name": name, "keyids": [key_id], "threshold": 1, "terminating": True, "paths": ["*"]}
        signed["delegations"] = {"keys": {key_id: signer.public_key.to_dict()}, "roles": [role]}

    return edited("releases", change)


def no_paths_but_hashes(role: dict[str, Any]) -> None:
    del role["paths"]
    role["path_hash_prefixes"] = [f"{digit:x}" for digit in range(16)]


def hashed_bins(signed: dict[str, Any]) -> None:
    [role] = signed["delegations"].pop("roles")
    signed["delegations"]["succinct_roles"] = {
        "keyids": role["keyids"], "threshold": 1, "bit_length": 8, "name_prefix": "releases",
    }  # fmt: skip


def one_key_under_two_ids(signed: dict[str, Any]) -> None:
    delegations = signed["delegations"]
    [role] = delegations["roles"]
    key = json.loads(json.dumps(delegations["keys"][role["keyids"][0]]))
    key["keyval"]["public"] = key["keyval"]["public"].upper()
    delegations["keys"]["0" * 64] = key
    role["keyids"].append("0" * 64)
    role["threshold"] = 2


def two_signers_must_sign(stage: Stage) -> None:
    """The delegation asks for two release signatures, and the publisher gives one."""
    add(stage.keys, "releases", "second", now=PUBLISHED)
    stage.publish(image(1), at=later(1), built_at=NEWER_BUILD)
    the_role(lambda role: role.update(threshold=2))(stage)


def twice_signed_for_two(stage: Stage) -> None:
    two_signers_must_sign(stage)
    signer = stage.keys.signer("releases")
    stage.edit("releases", lambda signed: None, [signer, signer])


def old_releases_under_a_new_snapshot(stage: Stage) -> None:
    """The cache is lost, and the thief of the online key names the old releases in a newer snapshot."""
    old, name = stage.path_of("releases").read_bytes(), stage.path_of("releases").name
    stage.publish(image(1), at=later(1), built_at=NEWER_BUILD)
    stage.clock = "2026-11-03T00:00:00Z"
    stage.source(stage.server.url).manifest()
    shutil.rmtree(stage.state / "metadata" / "cache")
    (stage.repository / "metadata" / name).write_bytes(old)
    stage.edit("snapshot", lambda signed: signed["meta"]["releases.json"].update(version=VERSION))
    stage.put("releases", old)


def huge_releases(stage: Stage) -> None:
    """The online key signs releases of a terabyte, and the server begins to send them."""
    stage.edit("snapshot", lambda signed: signed["meta"]["releases.json"].update(length=10**12))
    stage.server.rules["releases.json"] = flood


CASES = {
    "swapped delegation": refused_delegation(
        swapped_for_another_role, "targets delegate to 'bin', only releases is followed"
    ),
    "a delegation to a number": refused_delegation(
        the_role(lambda role: role.update(name=5)), "targets delegate to '5', only releases is followed"
    ),
    "a second delegation": refused_delegation(
        many_roles(2), "targets delegate to 2 roles, exactly one is followed"
    ),
    "delegations without an end": refused_delegation(
        many_roles(200), "targets delegate to 200 roles, exactly one is followed"
    ),
    "a delegation to nobody": refused_delegation(
        edited("targets", lambda signed: signed["delegations"].update(roles=[])),
        "targets delegate to 0 roles, exactly one is followed",
    ),
    "no delegation": refused_delegation(
        edited("targets", lambda signed: signed.pop("delegations")),
        "targets delegate to 0 roles, exactly one is followed",
    ),
    "a delegation in hashed bins": refused_delegation(
        edited("targets", hashed_bins), "targets delegate to 0 roles, exactly one is followed"
    ),
    "a delegation by the hashes of names": refused_delegation(
        the_role(no_paths_but_hashes), f"targets delegate other than {PATHS}, for good, to releases"
    ),
    "a delegation of every name": refused_delegation(
        the_role(lambda role: role.update(paths=["*"])), f"targets delegate other than {PATHS}, for good, to releases"
    ),
    "a delegation that goes on elsewhere": refused_delegation(
        the_role(lambda role: role.update(terminating=False)),
        f"targets delegate other than {PATHS}, for good, to releases",
    ),
    "targets that list a file themselves": refused_delegation(
        edited("targets", lambda signed: signed.update(targets={"manifest.json": {"length": 1, "hashes": {"x": "0"}}})),
        "targets list files themselves, which only releases may",
    ),
    "releases that delegate to themselves": refused_delegation(
        handed_on("releases"), "releases delegate on, which is not followed", by="release thief"
    ),
    "releases that delegate on": refused_delegation(
        handed_on("more"), "releases delegate on, which is not followed", by="release thief"
    ),
    "a delegation of targets to themselves": Case(
        by="owner thief", clause="4.5", attack=the_role(lambda role: role.update(name="targets")),
        code=ErrorCode.METADATA_INVALID,
        message="cannot trust the repository: {targets} does not read (Delegated roles cannot be empty or use "
        "top-level role names)",
    ),
    "one role twice": Case(
        by="owner thief", clause="4.5",
        attack=edited("targets", lambda signed: signed["delegations"].update(roles=signed["delegations"]["roles"] * 2)),
        code=ErrorCode.METADATA_INVALID,
        message="cannot trust the repository: {targets} does not read (Duplicate role releases)",
    ),
    "a delegation whose role lists no keys": Case(
        by="mirror", clause="4.5", attack=the_role(lambda role: role.update(keyids=7)),
        code=ErrorCode.METADATA_MALFORMED,
        message="cannot trust {targets}: signed.delegations.roles.0 lists no keys",
    ),
    "one release key under two ids": Case(
        by="owner thief", clause="4.5", attack=edited("targets", one_key_under_two_ids),
        code=ErrorCode.KEY_COUNTED_TWICE,
        message="cannot trust {targets}: signed.delegations.roles.0: '{release_key16}' and '0000000000000000' are "
        "one key, which counts once",
    ),
    "a file outside the delegation": Case(
        by="release thief", clause="5.6.7",
        attack=edited(
            "releases", lambda signed: signed["targets"].update({"root.json": signed["targets"]["manifest.json"]})
        ),
        code=ErrorCode.NOT_DELEGATED,
        message="cannot trust the repository: its releases list root.json, which was not delegated to them",
    ),
    "releases signed by a stranger": Case(
        by="mirror", clause="5.6.7", attack=signed_by_a_stranger("releases"),
        code=UNSIGNED, message=unsigned("releases"), remedy=OWN_KEYS,
    ),
    "releases signed by the targets key": Case(
        by="owner thief", clause="5.6.7", attack=signed_by("releases", "targets"),
        code=UNSIGNED, message=unsigned("releases"), remedy=OWN_KEYS,
    ),
    "releases signed by the online key": Case(
        by="online thief", clause="5.6.7", attack=signed_by("releases", "timestamp"),
        code=UNSIGNED, message=unsigned("releases"), remedy=OWN_KEYS,
    ),
    "targets signed by a release key": Case(
        by="release thief", clause="5.6.3", attack=signed_by("targets", "releases"),
        code=UNSIGNED, message=unsigned("targets"), remedy=OWN_KEYS,
    ),
    "releases signed by one of two signers": Case(
        by="release thief", clause="5.6.7", attack=two_signers_must_sign,
        code=FEW, message=unsigned("releases", "1/2"), remedy=OTHERS,
    ),
    "one release signature twice for two": Case(
        by="release thief", clause="5.6.7", attack=twice_signed_for_two,
        code=ErrorCode.METADATA_INVALID,
        message="cannot trust the repository: {releases} does not read (Multiple signatures found for keyid "
        "{release_key})",
    ),
    "the delegation in the releases' place": Case(
        by="online thief", clause="5.6.7", attack=instead("releases", "targets"),
        code=UNSIGNED, message=unsigned("releases"), remedy=OWN_KEYS,
    ),
    "the releases in the delegation's place": Case(
        by="online thief", clause="5.6.3", attack=instead("targets", "releases"),
        code=UNSIGNED, message=unsigned("targets"), remedy=OWN_KEYS,
    ),
    "the snapshot in the releases' place": Case(
        by="online thief", clause="5.6.7", attack=instead("releases", "snapshot"),
        code=MIXED, message="cannot trust {releases}: it is not a releases but a 'snapshot'",
    ),
    "expired releases": Case(
        by="release thief", clause="5.6.7", attack=edited("releases", lambda signed: signed.update(expires=SOON)),
        code=ErrorCode.METADATA_EXPIRED, message=expired("releases"), remedy=AGAIN,
    ),
    "releases of another version than the snapshot says": Case(
        by="release thief", clause="5.6.7",
        attack=edited("releases", lambda signed: signed.update(version=VERSION + 5)),
        code=MIXED, message=not_named(f"{VERSION}.releases.json", VERSION + 5),
    ),
    "releases of other content than the snapshot says": Case(
        by="mirror", clause="5.6.7", attack=swapped_bytes("releases", b"2027", b"2028"),
        code=MIXED, message="cannot trust the repository: {releases} is not the one its publication names",
    ),
    "releases hidden": Case(
        by="network", clause="5.6.7", attack=removed("metadata/*.releases.json"),
        code=INCOMPLETE, message=not_there(f"metadata/{VERSION}.releases.json"), remedy=WHOLE,
    ),
    "releases that no snapshot names": Case(
        by="online thief", clause="5.6.7",
        attack=edited("snapshot", lambda signed: signed["meta"].pop("releases.json")),
        code=ErrorCode.METADATA_INVALID,
        message="cannot trust the repository: Role releases was delegated but is not part of snapshot",
    ),
    "releases that the snapshot no longer names": Case(
        by="online thief", clause="5.5.5", knows=True,
        attack=republished(edited("snapshot", lambda signed: signed["meta"].pop("releases.json"))),
        code=ErrorCode.METADATA_INVALID,
        message="cannot trust the repository: New snapshot is missing info for 'releases.json'",
    ),
    "rollback of the releases that the snapshot names": Case(
        by="online thief", clause="5.5.5", knows=True,
        attack=republished(edited("snapshot", lambda signed: signed["meta"]["releases.json"].update(version=1))),
        code=ErrorCode.ROLLBACK_REFUSED, message=older("releases", 1, VERSION), remedy=NEWER,
    ),
    "old releases in a newer snapshot, after the cache was lost": Case(
        by="online thief", clause="5.5.5", attack=old_releases_under_a_new_snapshot,
        code=ErrorCode.ROLLBACK_REFUSED, message=older("releases", VERSION, NEXT), remedy=NEWER,
    ),
    "a terabyte of releases under the online key's signature": Case(
        by="online thief", clause="5.6.7", attack=huge_releases,
        code=ErrorCode.FETCH_TOO_LARGE,
        message="cannot fetch {url}/metadata/{releases}: it is 1000000000000 bytes, at most 4194304 are expected",
        remedy="Check that this address serves a published repository.",
    ),
}  # fmt: skip

"""True documents in places that are not theirs: of two publications, of another role, of another board."""

from __future__ import annotations

import shutil

from agent.contract.errors import ErrorCode
from tests.hostile.attacks import NEWER_BUILD, edited, instead, next_root, removed, swapped_bytes
from tests.hostile.board import PUBLISHED, Stage, image, later
from tests.hostile.case import Case

MIXED, INCOMPLETE = ErrorCode.METADATA_MIXED, ErrorCode.REPOSITORY_INCOMPLETE
WHOLE = "Check that this address serves the whole of a published repository."
PUBLISHED_THERE = "Check that this address serves a published repository."
VERSION = int(PUBLISHED.timestamp())


def mix_and_match(stage: Stage) -> None:
    """The newest timestamp and snapshot, with the releases of an older publication in place of theirs."""
    old = stage.path_of("releases").read_bytes()
    stage.publish(image(1), at=later(1), built_at=NEWER_BUILD)
    stage.path_of("releases").write_bytes(old)


def other_board(stage: Stage) -> None:
    shutil.rmtree(stage.repository)
    stage.publish(image(0), target="imx8mp")


def not_named(file: str, version: int) -> str:
    return f"cannot trust the repository: {file} is version {version}, which its publication does not name"


def not_there(path: str) -> str:
    return f"cannot fetch {{url}}/{path}: the server answers 404"


CASES = {
    "mix and match": Case(
        by="mirror", clause="5.6.7", attack=mix_and_match,
        code=MIXED, message="cannot trust the repository: {releases} is not the one its publication names",
    ),
    "snapshot of other content than the timestamp says": Case(
        by="mirror", clause="5.5.2", attack=swapped_bytes("snapshot", b"2027", b"2028"),
        code=MIXED, message="cannot trust the repository: {snapshot} is not the one its publication names",
    ),
    "targets of other content than the snapshot says": Case(
        by="mirror", clause="5.6.2", attack=swapped_bytes("targets", b"2027", b"2028"),
        code=MIXED, message="cannot trust the repository: {targets} is not the one its publication names",
    ),
    "snapshot longer than the timestamp says": Case(
        by="mirror", clause="5.5.1",
        attack=lambda stage: stage.path_of("snapshot").write_bytes(stage.path_of("snapshot").read_bytes() + b" "),
        code=ErrorCode.FETCH_TOO_LARGE, remedy=PUBLISHED_THERE,
        message="cannot fetch {url}/metadata/{snapshot}: it is {snapshot_bytes} bytes, "
        "at most {snapshot_signed} are expected",
    ),
    "root that has the version before": Case(
        by="root thief", clause="5.3.5", attack=next_root(lambda signed: signed.update(version=1)),
        code=MIXED, message=not_named("2.root.json", 1),
    ),
    "root that skips a version": Case(
        by="root thief", clause="5.3.5", attack=next_root(lambda signed: signed.update(version=3)),
        code=MIXED, message=not_named("2.root.json", 3),
    ),
    "snapshot of another version than the timestamp says": Case(
        by="online thief", clause="5.5.4",
        attack=edited("snapshot", lambda signed: signed.update(version=VERSION + 5)),
        code=MIXED, message=not_named(f"{VERSION}.snapshot.json", VERSION + 5),
    ),
    "targets of another version than the snapshot says": Case(
        by="owner thief", clause="5.6.4",
        attack=edited("targets", lambda signed: signed.update(version=VERSION + 5)),
        code=MIXED, message=not_named(f"{VERSION}.targets.json", VERSION + 5),
    ),
    "root that is another role's document": Case(
        by="mirror", clause="5.3.3", attack=next_root(lambda signed: signed.update(_type="targets")),
        code=MIXED, message="cannot trust 2.root.json: it is not a root but a 'targets'",
    ),
    "timestamp that is another role's document": Case(
        by="mirror", clause="5.4.2", attack=instead("timestamp", "snapshot"),
        code=MIXED, message="cannot trust timestamp.json: it is not a timestamp but a 'snapshot'",
    ),
    "targets that are another role's document": Case(
        by="online thief", clause="5.6.3", attack=instead("targets", "snapshot"),
        code=MIXED, message="cannot trust {targets}: it is not a targets but a 'snapshot'",
    ),
    "another board's runtime": Case(
        by="mirror", attack=other_board,
        code=ErrorCode.WRONG_TARGET,
        message="cannot deploy runtime pose 2: it is for imx8mp (x86_64), this board is virtual (x86_64)",
        remedy="Deploy with --target virtual.",
    ),
    "no repository": Case(
        by="network", clause="5.4.1", attack=removed("metadata/*.json"),
        code=INCOMPLETE, message=not_there("metadata/timestamp.json"), remedy=WHOLE,
    ),
    "snapshot hidden": Case(
        by="network", clause="5.5.1", attack=removed("metadata/*.snapshot.json"),
        code=INCOMPLETE, message=not_there(f"metadata/{VERSION}.snapshot.json"), remedy=WHOLE,
    ),
    "targets hidden": Case(
        by="network", clause="5.6.1", attack=removed("metadata/*.targets.json"),
        code=INCOMPLETE, message=not_there(f"metadata/{VERSION}.targets.json"), remedy=WHOLE,
    ),
}  # fmt: skip

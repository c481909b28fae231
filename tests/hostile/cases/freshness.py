"""Old, expired, replayed, frozen, from the future: what was true once, or will be."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime

from agent.contract.errors import ErrorCode
from tests.hostile.attacks import NEWER_BUILD, clock, edited, manifest_replaced, next_root, republished
from tests.hostile.board import PUBLISHED, Stage, image, later, manifest
from tests.hostile.case import Case

STALE, OLDER = ErrorCode.REPOSITORY_STALE, ErrorCode.ROLLBACK_REFUSED
NEWER = "Publish again on the host, which makes newer versions."
SET_CLOCK = "; if the time shown is wrong, set this board's clock."
REFRESH = "Run 'avocadoctl publish --refresh' on the host" + SET_CLOCK
RENEW = "Renew it on the host with 'avocadoctl keys sign' and publish" + SET_CLOCK
AGAIN = "Publish again on the host" + SET_CLOCK
VERSION = int(PUBLISHED.timestamp())
NEXT = int(later(1).timestamp())
SOON = "2026-11-01T23:00:00Z"


def expired(role: str, at: str = "2026-11-02T00:00:00Z") -> str:
    return f"cannot trust the repository: its {role} is expired (it is {at} here)"


def older(role: str, version: int, seen: int) -> str:
    return (
        "cannot trust the repository: it is older than what this board has seen "
        f"({role} version {version}, seen {seen})"
    )


def know_a_newer_one(stage: Stage) -> None:
    """The board accepts a newer publication, and the older one comes back."""
    old = stage.folder / "old"
    shutil.copytree(stage.repository, old)
    stage.publish(image(1), at=later(1), built_at=NEWER_BUILD)
    stage.clock = "2026-11-03T00:00:00Z"
    stage.source(stage.server.url).manifest()
    shutil.rmtree(stage.repository)
    shutil.copytree(old, stage.repository)


def lose_the_cache(stage: Stage) -> None:
    know_a_newer_one(stage)
    shutil.rmtree(stage.state / "metadata" / "cache")


def replay_the_timestamp(stage: Stage) -> None:
    old = stage.path_of("timestamp").read_bytes()
    stage.publish(image(1), at=later(1), built_at=NEWER_BUILD)
    stage.clock = "2026-11-03T00:00:00Z"
    stage.source(stage.server.url).manifest()
    stage.path_of("timestamp").write_bytes(old)


def sign_the_old_snapshot_afresh(stage: Stage) -> None:
    """Months later the cache has expired; the thief of the online key signs the old snapshot for today."""
    know_a_newer_one(stage)
    stage.clock = "2026-12-20T00:00:00Z"
    fresh = {"expires": "2027-01-01T00:00:00Z", "version": NEXT + 1}
    stage.edit("timestamp", lambda signed: signed.update(fresh))


def dead_clock(stage: Stage) -> None:
    """The clock is at zero, and what expired before the newest signed build comes back."""
    stage.publish(image(1), at=later(40), built_at="2026-12-11T10:00:00Z")
    stage.clock = "1970-01-01T00:00:00Z"
    stage.source(stage.server.url).manifest()
    bygone = {"expires": "2026-12-01T00:00:00Z", "version": int(later(41).timestamp())}
    stage.edit("timestamp", lambda signed: signed.update(bygone))


def older_than_what_runs(stage: Stage) -> None:
    stage.active = manifest(image(1), built_at="2026-11-01T10:00:01Z")


def built_in_the_future(stage: Stage) -> None:
    shutil.rmtree(stage.repository)
    stage.publish(image(0), at=datetime(2026, 11, 9, tzinfo=UTC), built_at="2026-11-09T00:00:00Z")
    manifest_replaced(b"2026-11-09T00", b"2099-11-09T00")(stage)


def publisher_in_2100(stage: Stage) -> None:
    """A host whose clock is wrong signs everything anew, but for the root, which it cannot."""
    shutil.rmtree(stage.repository)
    stage.publish(image(0), at=datetime(2100, 1, 1, 12, tzinfo=UTC), built_at="2100-01-01T12:00:00Z")


def drop_targets(stage: Stage) -> None:
    stage.publish(image(1), at=later(1), built_at=NEWER_BUILD)
    stage.edit("snapshot", lambda signed: signed["meta"].pop("targets.json"))


def fast_forward(stage: Stage) -> None:
    """The thief of the online key signs the last version there is; then the publisher goes on as before."""
    honest = stage.path_of("timestamp").read_bytes()
    stage.edit("timestamp", lambda signed: signed.update(version=(1 << 53) - 1))
    stage.source(stage.server.url).manifest()
    stage.path_of("timestamp").write_bytes(honest)
    assert json.loads(honest)["signed"]["version"] == VERSION


CASES = {
    "indefinite freeze: an expired timestamp": Case(
        by="mirror", clause="5.4.4", attack=clock("2026-11-20T00:00:00Z"),
        code=STALE, message=expired("timestamp", "2026-11-20T00:00:00Z"), remedy=REFRESH,
    ),
    "timestamp signed for the past": Case(
        by="online thief", clause="5.4.4", attack=edited("timestamp", lambda signed: signed.update(expires=SOON)),
        code=STALE, message=expired("timestamp"), remedy=REFRESH,
    ),
    "expired snapshot": Case(
        by="online thief", clause="5.5.6", attack=edited("snapshot", lambda signed: signed.update(expires=SOON)),
        code=STALE, message=expired("snapshot"), remedy=REFRESH,
    ),
    "expired targets": Case(
        by="owner thief", clause="5.6.5", attack=edited("targets", lambda signed: signed.update(expires=SOON)),
        code=ErrorCode.METADATA_EXPIRED, message=expired("targets"), remedy=RENEW,
    ),
    "expired root": Case(
        by="mirror", clause="5.3.10", attack=next_root(lambda signed: signed.update(expires=SOON)),
        code=ErrorCode.ROOT_EXPIRED, message=expired("root"), remedy=RENEW,
    ),
    "clock in 2100": Case(
        by="accident", clause="5.3.10", attack=clock("2100-01-01T00:00:00Z"),
        code=ErrorCode.ROOT_EXPIRED, message=expired("root", "2100-01-01T00:00:00Z"), remedy=RENEW,
    ),
    "clock in 1970 and a publication that expired": Case(
        by="mirror", clause="5.4.4", attack=dead_clock,
        code=STALE, message=expired("timestamp", "2026-12-11T10:00:00Z"), remedy=REFRESH,
    ),
    "rollback of the whole repository": Case(
        by="mirror", clause="5.4.3.1", attack=know_a_newer_one,
        code=OLDER, message=older("timestamp", VERSION, NEXT), remedy=NEWER,
    ),
    "rollback after the cache was lost": Case(
        by="mirror", clause="5.4.3.1", attack=lose_the_cache,
        code=OLDER, message=older("timestamp", VERSION, NEXT), remedy=NEWER,
    ),
    "replayed timestamp": Case(
        by="mirror", clause="5.4.3.1", attack=replay_the_timestamp,
        code=OLDER, message=older("timestamp", VERSION, NEXT), remedy=NEWER,
    ),
    "rollback of the timestamp's version": Case(
        by="online thief", clause="5.4.3.1", knows=True,
        attack=edited("timestamp", lambda signed: signed.update(version=VERSION - 1)),
        code=OLDER, message=older("timestamp", VERSION - 1, VERSION), remedy=NEWER,
    ),
    "rollback of the snapshot that the timestamp names": Case(
        by="online thief", clause="5.4.3.2", knows=True,
        attack=edited(
            "timestamp",
            lambda signed: (signed.update(version=VERSION + 1), signed["meta"]["snapshot.json"].update(version=1)),
        ),
        code=OLDER, message=older("snapshot", 1, VERSION), remedy=NEWER,
    ),
    "rollback of the targets that the snapshot names": Case(
        by="online thief", clause="5.5.5", knows=True,
        attack=republished(edited("snapshot", lambda signed: signed["meta"]["targets.json"].update(version=1))),
        code=OLDER, message=older("targets", 1, VERSION), remedy=NEWER,
    ),
    "targets that the snapshot no longer names": Case(
        by="online thief", clause="5.5.5", knows=True, attack=drop_targets,
        code=ErrorCode.METADATA_INVALID,
        message="cannot trust the repository: New snapshot is missing info for 'targets.json'",
    ),
    "old snapshot signed afresh": Case(
        by="online thief", clause="5.4.3.2", attack=sign_the_old_snapshot_afresh,
        code=OLDER, message=older("snapshot", VERSION, NEXT), remedy=NEWER,
    ),
    "fast forward, then an honest version": Case(
        by="online thief", clause="5.4.3.1", attack=fast_forward,
        code=OLDER, message=older("timestamp", VERSION, (1 << 53) - 1), remedy=NEWER,
    ),
    "runtime older than the active one": Case(
        by="release thief", attack=older_than_what_runs,
        code=ErrorCode.DOWNGRADE_REFUSED,
        message="cannot deploy runtime pose 2: it was built at 2026-11-01T10:00:00Z, the active one at "
        "2026-11-01T10:00:01Z",
        remedy="Build it again, or sign it with 'allow_downgrade: true'; to go back, run 'avocadoctl rollback'.",
    ),
    "runtime built after its signatures expire": Case(
        by="release thief", attack=built_in_the_future,
        code=ErrorCode.METADATA_INVALID,
        message="cannot trust the repository: its manifest says it was built at 2099-11-09T00:00:00Z, after its "
        "signatures expire",
    ),
    "publisher's clock in 2100": Case(
        by="accident", attack=publisher_in_2100,
        code=ErrorCode.METADATA_INVALID,
        message="cannot trust the repository: its manifest says it was built at 2100-01-01T12:00:00Z, after its "
        "signatures expire",
    ),
    "expiry in another spelling": Case(
        by="online thief", clause="4.3",
        attack=edited("timestamp", lambda signed: signed.update(expires="2026-11-8T12:00:00Z")),
        code=ErrorCode.SIGNATURE_INVALID,
        message="cannot trust the repository: timestamp was signed by 0/1 keys",
        remedy="Publish with the keys this board was provisioned with.",
    ),
    "time of building in another spelling": Case(
        by="release thief", attack=manifest_replaced(b"2026-11-01T10", b"2026-9-01T10"),
        code=ErrorCode.BAD_MANIFEST, remedy="",
        message="cannot read the manifest: document: Value error, time '2026-9-01T10:00:00Z' is not written as "
        "2026-09-01T10:00:00Z",
    ),
}  # fmt: skip

"""Repositories made by an attacker: each refused with its own code and message, the board's state as it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from securesystemslib.signer import CryptoSigner

from agent.contract.errors import ErrorCode
from agent.trust_state import problems
from tests.hostile.board import Stage, extension, image, later, manifest, refused, stranger
from tests.hostile.server import Server

PUBLISH_AGAIN = "Publish again with avocadoctl, and look at who else can write to the repository."
OWN_KEYS = "Publish with the keys this board was provisioned with."
REFRESH = "Run 'avocadoctl publish --refresh' on the host; if the time shown is wrong, set this board's clock."
NEWER = "Publish again on the host, which makes newer versions."

Attack = Callable[[Stage], None]


@dataclass(frozen=True)
class Case:
    """`attack` changes an honest repository; what must come of it is written out."""

    attack: Attack
    code: ErrorCode
    message: str
    remedy: str = PUBLISH_AGAIN


def raw(role: str, old: bytes, new: bytes) -> Attack:
    """Replace bytes of a role's document as text and leave it unsigned otherwise: the signature is the honest one."""

    def attack(stage: Stage) -> None:
        data = stage.path_of(role).read_bytes()
        assert old in data, f"{old!r} is not in {role}"
        stage.put(role, data.replace(old, new, 1))

    return attack


def edited(role: str, change: Callable[[dict[str, Any]], object], signers: list[CryptoSigner] | None = None) -> Attack:
    return lambda stage: stage.edit(role, change, signers)


def target_named(name: str) -> Attack:
    return edited("targets", lambda signed: signed["targets"].update({name: signed["targets"]["manifest.json"]}))


def signed_by_a_stranger(role: str) -> Attack:
    return lambda stage: stage.edit(role, lambda signed: None, [stranger()])


def mixed(stage: Stage) -> None:
    """The newest timestamp and snapshot, with the targets of an older publication in place of theirs."""
    old = stage.path_of("targets").read_bytes()
    stage.publish(image(1), at=later(1), built_at="2026-11-01T11:00:00Z")
    stage.path_of("targets").write_bytes(old)


def manifest_bytes_changed(stage: Stage) -> None:
    path = stage.target_file(".manifest.json")
    path.write_bytes(path.read_bytes().replace(b"virtual", b"VIRTUAL"))


def other_board(stage: Stage) -> None:
    shutil.rmtree(stage.repository)
    stage.publish(image(0), target="imx8mp")


def from_the_future(stage: Stage) -> None:
    shutil.rmtree(stage.repository)
    at = datetime(2026, 11, 9, tzinfo=UTC)
    stage.publish(image(0), at=at, built_at="2026-11-09T00:00:00Z")
    # The board's clock agrees with the signatures; the manifest alone claims a time after they expire.
    path = stage.target_file(".manifest.json")
    data = path.read_bytes().replace(b"2026-11-09T00", b"2099-11-09T00")
    replace_manifest(stage, data)


def replace_manifest(stage: Stage, data: bytes) -> None:
    import hashlib

    sha256 = hashlib.sha256(data).hexdigest()
    (stage.repository / "targets" / f"{sha256}.manifest.json").write_bytes(data)
    entry = {"length": len(data), "hashes": {"sha256": sha256}}
    stage.edit("targets", lambda signed: signed["targets"].update({"manifest.json": entry}))


def odd_manifest(old: bytes, new: bytes) -> Attack:
    def attack(stage: Stage) -> None:
        data = stage.target_file(".manifest.json").read_bytes()
        assert old in data
        replace_manifest(stage, data.replace(old, new, 1))

    return attack


def downgrade(stage: Stage) -> None:
    stage.active = manifest(image(1), built_at="2026-11-01T10:00:01Z")


def one_key_under_two_ids(stage: Stage) -> None:
    def change(signed: dict[str, Any]) -> None:
        role = signed["roles"]["targets"]
        first = role["keyids"][0]
        key = json.loads(json.dumps(signed["keys"][first]))
        key["keyval"]["public"] = key["keyval"]["public"].upper()
        signed["keys"]["0" * 64] = key
        role["keyids"].append("0" * 64)
        role["threshold"] = 2
        signed["version"] = 2

    document = json.loads(stage.path_of("root").read_bytes())["signed"]
    change(document)
    data = stage.signed_by("root", document)
    (stage.repository / "metadata" / "2.root.json").write_bytes(data)


def root_by_strangers(stage: Stage) -> None:
    document = json.loads(stage.path_of("root").read_bytes())["signed"]
    document["version"] = 2
    data = stage.signed_by("root", document, [stranger()])
    (stage.repository / "metadata" / "2.root.json").write_bytes(data)


def root_skips_a_version(stage: Stage) -> None:
    document = json.loads(stage.path_of("root").read_bytes())["signed"]
    document["version"] = 3
    (stage.repository / "metadata" / "2.root.json").write_bytes(stage.signed_by("root", document))


def clock(text: str) -> Attack:
    def attack(stage: Stage) -> None:
        stage.clock = text

    return attack


def nothing_there(stage: Stage) -> None:
    shutil.rmtree(stage.repository / "metadata")


def false_entry(change: Callable[[dict[str, Any]], object]) -> Attack:
    def attack(stage: Stage) -> None:
        def edit(signed: dict[str, Any]) -> None:
            name = next(name for name in signed["targets"] if name.endswith(".full"))
            change(signed["targets"][name])

        stage.edit("targets", edit)

    return attack


FULL = f"{extension(image(0)).image_id}.full"
INVALID = ErrorCode.METADATA_INVALID

CASES: dict[str, Case] = {
    "timestamp signed by a stranger": Case(
        signed_by_a_stranger("timestamp"),
        ErrorCode.SIGNATURE_INVALID,
        "cannot trust the repository: timestamp was signed by 0/1 keys",
        OWN_KEYS,
    ),
    "snapshot signed by a stranger": Case(
        signed_by_a_stranger("snapshot"),
        ErrorCode.SIGNATURE_INVALID,
        "cannot trust the repository: snapshot was signed by 0/1 keys",
        OWN_KEYS,
    ),
    "targets signed by a stranger": Case(
        signed_by_a_stranger("targets"),
        ErrorCode.SIGNATURE_INVALID,
        "cannot trust the repository: targets was signed by 0/1 keys",
        OWN_KEYS,
    ),
    "targets signed by the online key only": Case(
        lambda stage: stage.edit("targets", lambda signed: None, [stage.keys.signer("timestamp")]),
        ErrorCode.SIGNATURE_INVALID,
        "cannot trust the repository: targets was signed by 0/1 keys",
        OWN_KEYS,
    ),
    "root rotated by strangers": Case(
        root_by_strangers,
        ErrorCode.SIGNATURE_INVALID,
        "cannot trust the repository: root was signed by 0/1 keys",
        OWN_KEYS,
    ),
    "root that skips a version": Case(
        root_skips_a_version,
        ErrorCode.ROLLBACK_REFUSED,
        "cannot trust the repository: it is older than what this board has seen "
        "(Expected root version 2 instead got version 3)",
        NEWER,
    ),
    "one key under two ids": Case(
        one_key_under_two_ids,
        INVALID,
        "cannot trust 2.root.json: signed.roles.targets: '{targets}' and '0000000000000000' are one key, "
        "which counts once",
    ),
    "expired timestamp": Case(
        clock("2026-11-20T00:00:00Z"),
        ErrorCode.METADATA_EXPIRED,
        "cannot trust the repository: timestamp.json is expired (it is 2026-11-20T00:00:00Z here)",
        REFRESH,
    ),
    "clock in 2100": Case(
        clock("2100-01-01T00:00:00Z"),
        ErrorCode.METADATA_EXPIRED,
        "cannot trust the repository: Final root.json is expired (it is 2100-01-01T00:00:00Z here)",
        REFRESH,
    ),
    "mix and match": Case(
        mixed,
        INVALID,
        "cannot trust the repository: Observed hash {found} does not match expected hash {wanted}",
    ),
    "another board's runtime": Case(
        other_board,
        ErrorCode.WRONG_TARGET,
        "cannot deploy runtime pose 2: it is for imx8mp (x86_64), this board is virtual (x86_64)",
        "Deploy with --target virtual.",
    ),
    "older than the active runtime": Case(
        downgrade,
        ErrorCode.ROLLBACK_REFUSED,
        "cannot deploy runtime pose 2: it was built at 2026-11-01T10:00:00Z, the active one at 2026-11-01T10:00:01Z",
        "Build it again, or sign it with 'allow_downgrade: true'; to go back, run 'avocadoctl rollback'.",
    ),
    "built after its signatures expire": Case(
        from_the_future,
        INVALID,
        "cannot trust the repository: its manifest says it was built at 2099-11-09T00:00:00Z, "
        "after its signatures expire",
    ),
    "manifest's bytes changed": Case(
        manifest_bytes_changed,
        ErrorCode.HASH_MISMATCH,
        "cannot use manifest.json: its bytes do not match their signed hash",
        "Deploy again; if it happens again, look at what stands between this board and the repository.",
    ),
    "no repository": Case(
        nothing_there,
        ErrorCode.FETCH_FAILED,
        "cannot fetch {url}/metadata/timestamp.json: the server answers 404",
        "Check that this address serves a published repository.",
    ),
    "repeated key": Case(
        raw("timestamp", b'"version":', b'"version":9,"version":'),
        INVALID,
        "cannot trust timestamp.json: key 'version' stands twice",
    ),
    "repeated target": Case(
        raw("targets", b'"targets":{', b'"targets":{"manifest.json":{},'),
        INVALID,
        "cannot trust {targets_name}: key 'manifest.json' stands twice",
    ),
    "version is true": Case(
        edited("timestamp", lambda signed: signed.update(version=True)),
        INVALID,
        "cannot trust timestamp.json: signed.version is true or false where neither belongs",
    ),
    "version is 10**30": Case(
        edited("timestamp", lambda signed: signed.update(version=10**30)),
        INVALID,
        "cannot trust timestamp.json: a number of 31 digits is too large",
    ),
    "version of 5000 digits": Case(
        raw("timestamp", b'"version":', b'"x":' + b"9" * 5000 + b',"version":'),
        INVALID,
        "cannot trust timestamp.json: a number of 5000 digits is too large",
    ),
    "version is 1e3": Case(
        raw("timestamp", b'"version":', b'"x":1e3,"version":'),
        INVALID,
        "cannot trust timestamp.json: 1e3 is not a whole number",
    ),
    "not a number": Case(
        raw("timestamp", b'"signed":{', b'"signed":{"x":NaN,'),
        INVALID,
        "cannot trust timestamp.json: NaN is not a whole number",
    ),
    "nested 7000 deep": Case(
        raw("timestamp", b'"signed":{', b'"signed":{"x":' + b"[" * 7000 + b"]" * 7000 + b","),
        INVALID,
        "cannot trust timestamp.json: it is nested 7002 deep, at most 16 is read",
    ),
    "half a character": Case(
        raw("timestamp", b'"signed":{', b'"signed":{"x":"\\ud800",'),
        INVALID,
        "cannot trust timestamp.json: signed.x holds half a character",
    ),
    "byte order mark": Case(
        lambda stage: stage.put("timestamp", b"\xef\xbb\xbf" + stage.path_of("timestamp").read_bytes()),
        INVALID,
        "cannot trust timestamp.json: Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)",
    ),
    "latin-1": Case(
        raw("timestamp", b'"signed":{', b'"signed":{"x":"\xfc",'),
        INVALID,
        "cannot trust timestamp.json: 'utf-8' codec can't decode byte 0xfc in position {latin}: invalid start byte",
    ),
    "a list": Case(
        lambda stage: stage.put("timestamp", b"[]"),
        INVALID,
        "cannot trust timestamp.json: it is not signed metadata",
    ),
    "target outside the folder": Case(
        target_named("../../etc/passwd"),
        INVALID,
        "cannot trust {targets_name}: signed.targets: '../../etc/passwd' is not a name this agent knows",
    ),
    "target with an absolute path": Case(
        target_named("/etc/passwd"),
        INVALID,
        "cannot trust {targets_name}: signed.targets: '/etc/passwd' is not a name this agent knows",
    ),
    "target that looks like another": Case(
        target_named("m\u0430nifest.json"),
        INVALID,
        "cannot trust {targets_name}: signed.targets: 'm\u0430nifest.json' is not a name this agent knows",
    ),
    "target with an escape": Case(
        target_named("a\x1b[2Jb"),
        INVALID,
        "cannot trust {targets_name}: signed.targets: 'a\\x1b[2Jb' is not a name this agent knows",
    ),
    "target in percent signs": Case(
        target_named("%2e%2e%2fx"),
        INVALID,
        "cannot trust {targets_name}: signed.targets: '%2e%2e%2fx' is not a name this agent knows",
    ),
    "no manifest": Case(
        edited("targets", lambda signed: signed["targets"].pop("manifest.json")),
        INVALID,
        "cannot trust the repository: it offers no manifest",
    ),
    "manifest of 1 GiB": Case(
        edited("targets", lambda signed: signed["targets"]["manifest.json"].update(length=1 << 30)),
        INVALID,
        "cannot trust the repository: its manifest is 1073741824 bytes",
    ),
    "repeated key in the manifest": Case(
        odd_manifest(b'"target":', b'"target": "other", "target":'),
        INVALID,
        "cannot trust manifest.json: key 'target' stands twice",
    ),
    "path in the manifest": Case(
        odd_manifest(b'"name": "pose-model"', b'"name": "../../x"'),
        ErrorCode.BAD_MANIFEST,
        "cannot read the manifest: extensions.0.name: String should match pattern '\\A[a-z0-9][a-z0-9_-]{0,62}\\z'",
        "",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_repository_is_refused_and_nothing_changes(stage: Stage, server: Server, name: str) -> None:
    case = CASES[name]
    stage.publish(image(0))
    case.attack(stage)
    before = stage.snapshot()
    error = refused(stage.source(server.url).manifest)
    facts = {
        "url": server.url,
        "targets": stage.keys.signer("targets").public_key.keyid[:16],
    }
    if "{targets_name}" in case.message:
        facts["targets_name"] = stage.path_of("targets").name
    if "{latin}" in case.message:
        facts["latin"] = str(stage.path_of("timestamp").read_bytes().index(b"\xfc"))
    if "{found}" in case.message:
        facts |= hashes_of_mixed(stage)
    expected = case.message
    for key, value in facts.items():
        expected = expected.replace(f"{{{key}}}", value)
    assert (error.code, error.message, error.remedy) == (case.code, expected, case.remedy)
    assert stage.snapshot() == before


def hashes_of_mixed(stage: Stage) -> dict[str, str]:
    import hashlib

    snapshot = json.loads(stage.path_of("snapshot").read_bytes())["signed"]
    return {
        "found": hashlib.sha256(stage.path_of("targets").read_bytes()).hexdigest(),
        "wanted": snapshot["meta"]["targets.json"]["hashes"]["sha256"],
    }


ENTRIES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "too few chunks": (
        lambda entry: entry["custom"]["chunk_sha256"].pop(),
        f"cannot trust the repository: the entry of {FULL} is false: {FULL}: 0 chunks of 262144 bytes do not make "
        "{length}",
    ),
    "chunks of 1 GiB": (
        lambda entry: entry["custom"].update(chunk_bytes=1 << 30),
        f"cannot trust the repository: the entry of {FULL} is false: chunk_bytes: 1073741824 is not a number from 1 "
        "to 1048576",
    ),
    "another image's result": (
        lambda entry: entry["custom"].update(result_sha256="0" * 64),
        f"cannot trust the repository: the entry of {FULL} does not make that image",
    ),
    "no sha256": (
        lambda entry: entry.update(hashes={"sha512": "0" * 128}),
        f"cannot trust the repository: the entry of {FULL} is false: 'sha256'",
    ),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_false_entry_of_a_transfer_is_refused(stage: Stage, server: Server, name: str) -> None:
    change, message = ENTRIES[name]
    offered = stage.publish(image(0))
    length = stage.target_file(".full").stat().st_size
    false_entry(change)(stage)
    source = stage.source(server.url)
    source.manifest()
    before = stage.snapshot()
    error = refused(lambda: source.fetch(offered.extensions[0], [], lambda done, total: None))
    assert (error.code, error.message) == (INVALID, message.replace("{length}", str(length)))
    assert stage.snapshot() == before


def test_a_repository_rolled_back_is_refused_whatever_became_of_the_cache(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    old = stage.folder / "old"
    shutil.copytree(stage.repository, old)
    stage.publish(image(1), at=later(1), built_at="2026-11-02T10:00:00Z")
    stage.clock = "2026-11-03T00:00:00Z"
    stage.source(server.url).manifest()
    shutil.rmtree(stage.repository)
    shutil.copytree(old, stage.repository)
    for lost in ((), ("timestamp.json", "snapshot.json"), ("targets.json",), ("timestamp.json",)):
        for name in lost:
            (stage.state / "metadata" / "cache" / name).unlink(missing_ok=True)
        before = stage.snapshot()
        error = refused(stage.source(server.url).manifest)
        assert error.code is ErrorCode.ROLLBACK_REFUSED
        assert error.message.startswith("cannot trust the repository: it is older than what this board has seen (")
        assert error.remedy == NEWER
        assert stage.snapshot() == before
        stage.clock = "2026-11-04T00:00:00Z"


@pytest.mark.parametrize("damage", ["cut short", "gone", "a folder", "a loop", "noise", "empty"])
@pytest.mark.parametrize("name", ["timestamp.json", "snapshot.json", "targets.json", "root_history/1.root.json"])
def test_a_damaged_cache_is_fetched_again_and_forgets_nothing(
    stage: Stage, server: Server, name: str, damage: str
) -> None:
    stage.publish(image(0))
    offered = stage.source(server.url).manifest()
    seen = (stage.state / "metadata" / "seen.json").read_bytes()
    path = stage.state / "metadata" / "cache" / name
    data = path.read_bytes()
    path.unlink()
    match damage:
        case "cut short":
            path.write_bytes(data[: len(data) // 2])
        case "a folder":
            path.mkdir()
        case "a loop":
            path.symlink_to(path.name)
        case "noise":
            path.write_bytes(bytes(range(256)) * 8)
        case "empty":
            path.touch()
    assert stage.source(server.url).manifest() == offered
    assert (stage.state / "metadata" / "seen.json").read_bytes() == seen
    assert path.read_bytes() == data


def test_a_damaged_anchor_is_named_and_nothing_is_fetched(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    path = stage.state / "metadata" / "root.json"
    path.write_bytes(path.read_bytes()[:100])
    before = stage.snapshot()
    error = refused(stage.source(server.url).manifest)
    assert error.code is ErrorCode.TRUST_STATE_DAMAGED
    assert error.message.startswith(f"cannot trust any repository: the provisioned {path} does not read (")
    assert error.remedy == "Provision this board again with 'avocadoctl provision'; its runtimes stay."
    assert stage.snapshot() == before
    assert server.asked == []


def test_a_damaged_record_of_versions_is_named_and_never_forgotten(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    stage.source(server.url).manifest()
    for name in ("seen.json", "seen.copy.json"):
        (stage.state / "metadata" / name).write_bytes(b'{"schema": 1}')
    path = stage.state / "metadata" / "seen.json"
    before = stage.snapshot()
    error = refused(stage.source(server.url).manifest)
    assert error.code is ErrorCode.TRUST_STATE_DAMAGED
    assert error.message == f"cannot trust any repository: {path} is damaged (KeyError: 'built_at')"
    assert stage.snapshot() == before
    assert problems(stage.state / "metadata")[0].message == error.message


@pytest.mark.parametrize("name", ["seen.json", "seen.copy.json"])
@pytest.mark.parametrize("damage", [b"", b"{", None, b'{"schema": 1, "root": 0}'])
def test_one_damaged_record_of_versions_is_made_again_from_the_other(
    stage: Stage, server: Server, name: str, damage: bytes | None
) -> None:
    stage.publish(image(0))
    offered = stage.source(server.url).manifest()
    path = stage.state / "metadata" / name
    good = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
        assert [error.code for error in problems(stage.state / "metadata")] == [ErrorCode.TRUST_STATE_DAMAGED]
    assert stage.source(server.url).manifest() == offered
    assert path.read_bytes() == good
    assert problems(stage.state / "metadata") == []


def test_a_dead_clock_neither_locks_out_nor_accepts_what_expired(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    stage.clock = "1970-01-01T00:00:00Z"
    stage.source(server.url).manifest()
    stage.publish(image(1), at=later(40), built_at="2026-12-11T10:00:00Z")
    stage.source(server.url).manifest()
    # The signatures of the first publication expired before the second was built, whatever the clock says.
    seen = json.loads((stage.state / "metadata" / "seen.json").read_bytes())
    assert seen["built_at"] == "2026-12-11T10:00:00Z"
    stage.edit("timestamp", lambda signed: signed.update(expires="2026-12-01T00:00:00Z", version=signed["version"] + 1))
    error = refused(stage.source(server.url).manifest)
    assert error.code is ErrorCode.METADATA_EXPIRED
    assert error.message == "cannot trust the repository: timestamp.json is expired (it is 2026-12-11T10:00:00Z here)"


def test_a_clock_that_was_wrong_once_does_no_lasting_harm(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    stage.clock = "2100-01-01T00:00:00Z"
    assert refused(stage.source(server.url).manifest).code is ErrorCode.METADATA_EXPIRED
    stage.clock = "2026-11-02T00:00:00Z"
    assert stage.source(server.url).manifest().target == "virtual"


def test_a_signed_permission_allows_a_downgrade(stage: Stage, server: Server) -> None:
    stage.active = manifest(image(1), built_at="2026-11-01T10:00:01Z")
    stage.publish(image(0), allow_downgrade=True)
    assert stage.source(server.url).manifest().built_at < stage.active.built_at

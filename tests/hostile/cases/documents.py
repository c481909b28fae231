"""JSON that two readers understand differently, or that costs more than it weighs; metadata that is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from agent.contract.errors import ErrorCode
from tests.hostile.attacks import edited, manifest_replaced, next_root, padded, raw
from tests.hostile.board import Stage
from tests.hostile.case import Case

MALFORMED, INVALID, TWICE = ErrorCode.METADATA_MALFORMED, ErrorCode.METADATA_INVALID, ErrorCode.DUPLICATE_MEMBER
OPENING = b'"signed":{'


def inserted(data: bytes) -> Callable[[Stage], object]:
    """One more member at the beginning of the timestamp's signed part."""
    return raw("timestamp", OPENING, OPENING + data)


def without(role: str, *keys: str) -> Callable[[Stage], object]:
    """A document that lacks what it must have, correctly signed."""

    def change(signed: dict[str, Any]) -> None:
        for key in keys[:-1]:
            signed = signed[key]
        del signed[keys[-1]]

    return next_root(change) if role == "root" else edited(role, change)


def with_mark(stage: Stage) -> None:
    stage.put("timestamp", b"\xef\xbb\xbf" + stage.path_of("timestamp").read_bytes())


def in_utf16(stage: Stage) -> None:
    stage.put("timestamp", stage.path_of("timestamp").read_bytes().decode().encode("utf-16-le"))


def root_of_no_version(stage: Stage) -> None:
    """The first root again, where the second belongs: python-tuf takes null for version 1, so the signature holds."""
    metadata = stage.repository / "metadata"
    root = json.loads((metadata / "1.root.json").read_bytes())
    root["signed"]["version"] = None
    (metadata / "2.root.json").write_text(json.dumps(root))


def unread(why: str, file: str = "timestamp.json") -> str:
    return f"cannot trust {file}: {why}"


def unfit(why: str, file: str = "timestamp.json") -> str:
    return f"cannot trust the repository: {file} does not read ({why})"


CASES = {
    "repeated member": Case(
        by="mirror", attack=raw("timestamp", b'"version":', b'"version":9,"version":'),
        code=TWICE, message=unread("key 'version' stands twice"),
    ),
    "repeated member, spelt with an escape": Case(
        by="mirror", attack=raw("timestamp", b'"version":', b'"\\u0076ersion":9,"version":'),
        code=TWICE, message=unread("key 'version' stands twice"),
    ),
    "repeated target": Case(
        by="release thief", attack=raw("releases", b'"targets":{', b'"targets":{"manifest.json":{},'),
        code=TWICE, message=unread("key 'manifest.json' stands twice", "{releases}"),
    ),
    "repeated member in the manifest": Case(
        by="release thief", attack=manifest_replaced(b'"target":', b'"target": "other", "target":'),
        code=TWICE, message=unread("key 'target' stands twice", "manifest.json"),
    ),
    "version is true": Case(
        by="online thief", attack=edited("timestamp", lambda signed: signed.update(version=True)),
        code=MALFORMED, message=unread("signed.version is true or false where neither belongs"),
    ),
    "version is null": Case(
        by="mirror", clause="5.3.5", attack=root_of_no_version,
        code=MALFORMED, message=unread("signed.version is null", "2.root.json"),
    ),
    "version is 10**30": Case(
        by="online thief", attack=edited("timestamp", lambda signed: signed.update(version=10**30)),
        code=MALFORMED, message=unread("a number of 31 digits is too large"),
    ),
    "version of 5000 digits": Case(
        by="mirror", attack=inserted(b'"x":' + b"9" * 5000 + b","),
        code=MALFORMED, message=unread("a number of 5000 digits is too large"),
    ),
    "version is 1e3": Case(
        by="mirror", attack=inserted(b'"x":1e3,'),
        code=MALFORMED, message=unread("1e3 is not a whole number"),
    ),
    "not a number": Case(
        by="mirror", attack=inserted(b'"x":NaN,'),
        code=MALFORMED, message=unread("NaN is not a whole number"),
    ),
    "minus infinity": Case(
        by="mirror", attack=inserted(b'"x":-Infinity,'),
        code=MALFORMED, message=unread("-Infinity is not a whole number"),
    ),
    "nested 7000 deep": Case(
        by="mirror", attack=inserted(b'"x":' + b"[" * 7000 + b"]" * 7000 + b","),
        code=MALFORMED, message=unread("it is nested 7002 deep, at most 16 is read"),
    ),
    "half a character": Case(
        by="mirror", attack=inserted(b'"x":"\\ud800",'),
        code=MALFORMED, message=unread("signed.x holds half a character"),
    ),
    "byte order mark": Case(
        by="mirror", attack=with_mark,
        code=MALFORMED,
        message=unread("Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)"),
    ),
    "latin-1": Case(
        by="mirror", attack=raw("timestamp", b"{", b'{"x":"\xfc",'),
        code=MALFORMED, message=unread("'utf-8' codec can't decode byte 0xfc in position 6: invalid start byte"),
    ),
    "utf-16": Case(
        by="mirror", attack=in_utf16,
        code=MALFORMED,
        message=unread("Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ),
    "a list": Case(
        by="mirror", attack=lambda stage: stage.put("timestamp", b"[]"),
        code=MALFORMED, message=unread("it is not signed metadata"),
    ),
    "nothing": Case(
        by="mirror", attack=lambda stage: stage.put("timestamp", b""),
        code=MALFORMED, message=unread("Expecting value: line 1 column 1 (char 0)"),
    ),
    "cut short": Case(
        by="mirror", attack=lambda stage: stage.put("timestamp", stage.path_of("timestamp").read_bytes()[:20]),
        code=MALFORMED, message=unread("Unterminated string starting at: line 1 column 17 (char 16)"),
    ),
    "garbage after the end": Case(
        by="mirror", clause="4.2", attack=padded("timestamp", b"{}"),
        code=MALFORMED, message=unread("Extra data: line 1 column {timestamp_column} (char {timestamp_end})"),
    ),
    "white space without an end": Case(
        by="mirror", clause="5.4.1", attack=padded("timestamp", b" " * 20_000),
        code=ErrorCode.FETCH_TOO_LARGE,
        message="cannot fetch {url}/metadata/timestamp.json: it is {timestamp_bytes} bytes, at most 16384 are expected",
        remedy="Check that this address serves a published repository.",
    ),
    "no version": Case(
        by="online thief", clause="4.3", attack=without("timestamp", "version"),
        code=INVALID, message=unfit("there is no 'version'"),
    ),
    "a version below one": Case(
        by="online thief", clause="4.3", attack=edited("timestamp", lambda signed: signed.update(version=0)),
        code=INVALID, message=unfit("version must be > 0, got 0"),
    ),
    "a date that is none": Case(
        by="online thief", clause="4.3", attack=edited("timestamp", lambda signed: signed.update(expires="tomorrow")),
        code=INVALID, message=unfit("time data 'tomorrow' does not match format '%Y-%m-%dT%H:%M:%SZ'"),
    ),
    "a specification of another age": Case(
        by="online thief", clause="4.3",
        attack=edited("timestamp", lambda signed: signed.update(spec_version="2.0.0")),
        code=INVALID, message=unfit("Unsupported spec_version 2.0.0"),
    ),
    "a timestamp that names no snapshot": Case(
        by="online thief", clause="5.4.2", attack=edited("timestamp", lambda signed: signed.update(meta={})),
        code=INVALID, message=unfit("there is no 'snapshot.json'"),
    ),
    "a root without a role": Case(
        by="mirror", clause="5.3.3", attack=without("root", "roles", "snapshot"),
        code=INVALID, message=unfit("Role names must be the top-level metadata roles", "2.root.json"),
    ),
    "a root whose role lists no keys": Case(
        by="mirror", clause="5.3.3", attack=next_root(lambda signed: signed["roles"]["targets"].update(keyids=7)),
        code=MALFORMED, message=unread("signed.roles.targets lists no keys", "2.root.json"),
    ),
    "a root whose key id is an object": Case(
        by="mirror", clause="5.3.3", attack=next_root(lambda signed: signed["roles"]["root"].update(keyids=[{}])),
        code=MALFORMED, message=unread("signed.roles.root: key {} is not there", "2.root.json"),
    ),
    "a root with an escape in a role's name": Case(
        by="mirror", clause="5.3.3", attack=next_root(lambda signed: signed["roles"].update({"\x1b[2J": []})),
        code=MALFORMED, message=unread("signed.roles.'\\x1b[2J' lists no keys", "2.root.json"),
    ),
    "a root whose key has no value": Case(
        by="mirror", clause="5.3.3",
        attack=next_root(lambda signed: [key.update(keyval=[]) for key in signed["keys"].values()]),
        code=MALFORMED, message=unread("signed.roles.root: key '{root_key}' is not there", "2.root.json"),
    ),
}  # fmt: skip

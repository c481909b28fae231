"""Signed entries that are false: a manifest nobody could read, a transfer that cannot make its image."""

from __future__ import annotations

from agent.contract.errors import ErrorCode
from tests.hostile.attacks import edited, entry_changed, manifest_replaced, offer_manifest, removed
from tests.hostile.board import Stage, extension, image
from tests.hostile.case import Attack, Case

FULL = f"{extension(image(0)).image_id}.full"
FALSE, INCOMPLETE = ErrorCode.ENTRY_INVALID, ErrorCode.REPOSITORY_INCOMPLETE
WHOLE = "Check that this address serves the whole of a published repository."
DEPLOY_AGAIN = "Deploy again; if it happens again, look at what stands between this board and the repository."


def false_entry(attack: Attack, why: str) -> Case:
    """The board refuses it as soon as it looks for a way to the image."""
    return Case(
        by="release thief", attack=attack, asks="sizes", code=FALSE,
        message=f"cannot trust the repository: the entry of {FULL} {why}",
    )  # fmt: skip


def manifest_bytes_changed(stage: Stage) -> None:
    path = stage.target_file(".manifest.json")
    path.write_bytes(path.read_bytes().replace(b"virtual", b"VIRTUAL"))


def longer_manifest(stage: Stage) -> None:
    path = stage.target_file(".manifest.json")
    path.write_bytes(path.read_bytes() + b"\n")


CASES = {
    "no manifest": Case(
        by="release thief", attack=edited("releases", lambda signed: signed["targets"].pop("manifest.json")),
        code=INCOMPLETE, message="cannot trust the repository: it offers no manifest",
    ),
    "manifest hidden": Case(
        by="network", attack=removed("targets/*.manifest.json"),
        code=INCOMPLETE, message="cannot fetch {url}/targets/{manifest}: the server answers 404", remedy=WHOLE,
    ),
    "manifest of 1 GiB": Case(
        by="release thief",
        attack=edited("releases", lambda signed: signed["targets"]["manifest.json"].update(length=1 << 30)),
        code=ErrorCode.FETCH_TOO_LARGE,
        message="cannot trust the repository: its manifest is 1073741824 bytes, at most 262144 are read",
    ),
    "manifest whose hash is a path": Case(
        by="release thief",
        attack=edited("releases", lambda signed: signed["targets"]["manifest.json"]["hashes"].update(sha256="../x")),
        code=FALSE, message="cannot trust the repository: the entry of manifest.json has no sha256",
    ),
    "manifest's bytes changed": Case(
        by="mirror", attack=manifest_bytes_changed,
        code=ErrorCode.HASH_MISMATCH, message="cannot use manifest.json: its bytes do not match their signed hash",
        remedy=DEPLOY_AGAIN,
    ),
    "manifest longer than signed": Case(
        by="mirror", attack=longer_manifest,
        code=ErrorCode.LENGTH_MISMATCH,
        message="cannot fetch {url}/targets/{manifest}: it is {manifest_bytes} bytes, {manifest_signed} are signed",
        remedy="Publish again, or look at what stands between this board and the repository.",
    ),
    "manifest that is a list": Case(
        by="release thief", attack=lambda stage: offer_manifest(stage, b"[]"),
        code=ErrorCode.BAD_MANIFEST, remedy="",
        message="cannot read the manifest: document: Input should be a valid dictionary or instance of Manifest",
    ),
    "manifest of a newer version": Case(
        by="release thief", attack=manifest_replaced(b'"manifest_version": 1', b'"manifest_version": 2'),
        code=ErrorCode.NEWER_SCHEMA, message="cannot read the manifest: version 2, this agent reads version 1",
        remedy="Update the avocado-agent extension first.",
    ),
    "too few chunks": false_entry(
        entry_changed(lambda entry: entry["custom"]["chunk_sha256"].pop()),
        f"is false: {FULL}: 0 chunks of 262144 bytes do not make {{full_bytes}}",
    ),
    "chunks of 1 GiB": false_entry(
        entry_changed(lambda entry: entry["custom"].update(chunk_bytes=1 << 30)),
        "is false: chunk_bytes: 1073741824 is not a number from 1 to 1048576",
    ),
    "a chunk's hash that is none": false_entry(
        entry_changed(lambda entry: entry["custom"].update(chunk_sha256=["x"])),
        f"is false: {FULL}: chunk_sha256 is not a list of hashes",
    ),
    "another image's result": false_entry(
        entry_changed(lambda entry: entry["custom"].update(result_sha256="0" * 64)),
        "does not make that image",
    ),
    "a result of another size": false_entry(
        entry_changed(lambda entry: entry["custom"].update(result_size_bytes=1)),
        "does not make that image",
    ),
    "a full transfer with a base": false_entry(
        entry_changed(lambda entry: entry["custom"].update(base_sha256="0" * 64, base_size_bytes=1)),
        "does not make that image",
    ),
    "no sha256": false_entry(
        entry_changed(lambda entry: entry.update(hashes={"sha512": "0" * 128})),
        "is false: 'sha256'",
    ),
    "a hash that is a path": false_entry(
        entry_changed(lambda entry: entry.update(hashes={"sha256": "../../x"})),
        f"is false: {FULL}: there is no sha256 of it",
    ),
    "an image nobody offers": Case(
        by="release thief", asks="sizes",
        attack=edited("releases", lambda signed: signed["targets"].pop(FULL)),
        code=INCOMPLETE, message="cannot fetch image pose-model 1: the repository does not offer it",
        remedy="Publish the runtime again with every image.",
    ),
}  # fmt: skip

"""The runtime manifest: a signed, ordered list of images for one target board.

`manifest_version` is 1. Keys this version does not know are kept when a manifest is written again and otherwise
ignored; a newer version is refused. The order of `extensions` is the merge order, highest first, so the link of the
first one sorts last: `NN = 99 - index`. Names become file names and lines of mount options on the board, so they are
restricted here, at the boundary, to a form that no tool reads as syntax.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from agent.contract.errors import ErrorCode, OperationError

MANIFEST_VERSION = 1
MAX_MANIFEST_BYTES = 256 * 1024
MAX_EXTENSIONS = 64
IMAGE_NAMESPACE = uuid.UUID("7488fa35-6390-425b-bbbf-b156cfe1eed2")

# The image a board makes itself, over all others: one index of the kernel modules of all (agent/ports/modules.py).
MODULE_INDEX = "zz-module-index"
MODULE_INDEX_LINK = f"99-{MODULE_INDEX}.raw"

# No leading dash or dot, and nothing that a mount option, a unit name or a shell would read as syntax.
Name = Annotated[str, StringConstraints(pattern=r"\A[a-z0-9][a-z0-9_-]{0,62}\z")]
Version = Annotated[str, StringConstraints(pattern=r"\A[A-Za-z0-9][A-Za-z0-9.+~_-]{0,63}\z")]
Sha256 = Annotated[str, StringConstraints(pattern=r"\A[0-9a-f]{64}\z")]


def _canonical_uuid(text: str) -> str:
    if str(uuid.UUID(text)) != text:
        raise ValueError("not a lower-case canonical UUID")
    return text


Uuid = Annotated[str, StringConstraints(max_length=36), AfterValidator(_canonical_uuid)]


def image_id(sha256_hex: str) -> str:
    """UUIDv5 of the image's lower-case sha256 hex, the name under which a board stores it."""
    return str(uuid.uuid5(IMAGE_NAMESPACE, sha256_hex))


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class RuntimeName(_Part):
    """What a person calls this runtime."""

    name: Name
    version: Version


class Extension(_Part):
    """One image of the runtime. `types` says what it merges over: `sysext` /usr and /opt, `confext` /etc."""

    name: Name
    version: Version
    image_id: Uuid
    sha256: Sha256
    size_bytes: Annotated[int, Field(ge=1, le=1 << 40)]
    types: Annotated[list[Literal["sysext", "confext"]], Field(min_length=1, max_length=2)]

    @model_validator(mode="after")
    def _named_by_content(self) -> Extension:
        if image_id(self.sha256) != self.image_id:
            raise ValueError(f"image_id {self.image_id} is not the id of sha256 {self.sha256}")
        if len(set(self.types)) != len(self.types):
            raise ValueError("a type is listed twice")
        return self


class Requires(_Part):
    """What the board must supply. `python`: minor version such as "3.13"; `agent`: least version; `os`: os-release."""

    python: str | None = None
    agent: str | None = None
    os: dict[str, str] = Field(default_factory=dict)


class Manifest(_Part):
    """A runtime as it was signed."""

    manifest_version: Literal[1]
    id: Uuid
    built_at: str
    runtime: RuntimeName
    extensions: Annotated[list[Extension], Field(max_length=MAX_EXTENSIONS)]
    target: Name
    arch: Literal["x86_64", "aarch64"]
    requires: Requires = Field(default_factory=Requires)
    confirm: dict[str, Any] = Field(default_factory=dict)
    os_bundle: dict[str, Any] | None = None
    allow_downgrade: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        names = [extension.name for extension in self.extensions]
        if len(set(names)) != len(names):
            raise ValueError("an extension is listed twice")
        if MODULE_INDEX in names or (names and names[0] > MODULE_INDEX):
            raise ValueError(f"an extension's name must sort before {MODULE_INDEX}, which a board merges over all")
        parse_time(self.built_at)
        return self

    def link_name(self, extension: Extension) -> str:
        """`NN-<name>.raw`: the file name that gives systemd the list's merge order."""
        return f"{99 - self.extensions.index(extension):02d}-{extension.name}.raw"


def parse_time(text: str) -> datetime:
    """An RFC 3339 time in UTC such as `2026-11-30T22:10:00Z`. Raises ValueError for anything else.

    One spelling only, since times are compared as they are written: `2026-9-1` would come after `2026-11-30`.
    """
    moment = datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    if format_time(moment) != text:
        raise ValueError(f"time {text!a} is not written as {format_time(moment)}")
    return moment


def format_time(moment: datetime) -> str:
    """The inverse of `parse_time`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} stands twice")
        found[key] = value
    return found


def parse_manifest(data: bytes) -> Manifest:
    """Parse a manifest's bytes. Raises OperationError `bad-manifest`, or `newer-schema` for a newer version.

    Repeated keys are refused: two readers of such a document see different values.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise OperationError(
            ErrorCode.BAD_MANIFEST, f"cannot read the manifest: {len(data)} bytes, limit {MAX_MANIFEST_BYTES}"
        )
    try:
        document = json.loads(data, object_pairs_hook=_no_repeats)
        version = document.get("manifest_version") if isinstance(document, dict) else None
        if isinstance(version, int) and version > MANIFEST_VERSION:
            raise OperationError(
                ErrorCode.NEWER_SCHEMA,
                f"cannot read the manifest: version {version}, this agent reads version {MANIFEST_VERSION}",
                "Update the avocado-agent extension first.",
            )
        return Manifest.model_validate(document)
    except (ValueError, RecursionError, ValidationError) as cause:
        raise OperationError(ErrorCode.BAD_MANIFEST, f"cannot read the manifest: {_first_line(cause)}") from cause


def _first_line(cause: Exception) -> str:
    if isinstance(cause, ValidationError):
        first = cause.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        return f"{where}: {first['msg']}"
    return str(cause).splitlines()[0] if str(cause) else type(cause).__name__


def manifest_bytes(manifest: Manifest) -> bytes:
    """The bytes that are signed and stored: sorted keys, one trailing newline."""
    return (json.dumps(manifest.model_dump(exclude_none=True), sort_keys=True, indent=1) + "\n").encode()


def sha256_hex(data: bytes) -> str:
    """Lower-case sha256 hex of some bytes."""
    return hashlib.sha256(data).hexdigest()

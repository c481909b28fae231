"""What a repository's signed entry says of a transfer: from what, to what, and the hash of every piece.

A transfer is a file in the delta format, with a base or without one. Its signed entry carries the hash of each chunk,
so that a chunk is verified before the decoder sees a byte of it, and an interrupted transfer goes on at a chunk.
`docs/formats.md`, "A transfer in the repository".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FORMAT = 1
MANIFEST_NAME = "manifest.json"
# Who lists a repository's files: the one role that `targets` delegates to, and the names it may list.
RELEASES = "releases"
RELEASE_PATHS = (MANIFEST_NAME, "*.full", "*.delta")
SMALL_CHUNK_BYTES = 256 * 1024
LARGE_CHUNK_BYTES = 1 << 20
_SMALL_FILE_BYTES = 64 << 20
MAX_TRANSFER_BYTES = 1 << 40

_SHA256 = re.compile(r"\A[0-9a-f]{64}\Z")


def is_sha256(value: object) -> bool:
    """Whether this is a sha256 in the one spelling that becomes part of a file's name."""
    return isinstance(value, str) and _SHA256.match(value) is not None


def full_name(image_id: str) -> str:
    """The target name of an image's full transfer."""
    return f"{image_id}.full"


def delta_name(base_image_id: str, image_id: str) -> str:
    """The target name of the delta from one image to another."""
    return f"{base_image_id}--{image_id}.delta"


def chunk_bytes_for(size_bytes: int) -> int:
    """How long the chunks of a transfer of this size are."""
    return SMALL_CHUNK_BYTES if size_bytes <= _SMALL_FILE_BYTES else LARGE_CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer as its signed entry describes it. `size_bytes` and `sha256` are those of the transfer file."""

    name: str
    size_bytes: int
    sha256: str
    result_sha256: str
    result_size_bytes: int
    chunk_bytes: int
    chunk_sha256: tuple[str, ...]
    base_sha256: str | None = None
    base_size_bytes: int = 0

    def custom(self) -> dict[str, Any]:
        """The `custom` member of the entry."""
        found: dict[str, Any] = {
            "format": FORMAT,
            "result_sha256": self.result_sha256,
            "result_size_bytes": self.result_size_bytes,
            "chunk_bytes": self.chunk_bytes,
            "chunk_sha256": list(self.chunk_sha256),
        }
        if self.base_sha256 is not None:
            found |= {"base_sha256": self.base_sha256, "base_size_bytes": self.base_size_bytes}
        return found


def parse_transfer(name: str, size_bytes: int, sha256: str, custom: Mapping[str, Any]) -> Transfer | None:
    """The transfer behind a signed entry; None when its format is not ours. Raises ValueError for a false entry."""
    if custom.get("format") != FORMAT:
        return None
    chunk_bytes = _whole(custom, "chunk_bytes", 1, LARGE_CHUNK_BYTES)
    chunks = custom.get("chunk_sha256")
    if not isinstance(chunks, list) or not all(is_sha256(item) for item in chunks):
        raise ValueError(f"{name}: chunk_sha256 is not a list of hashes")
    if not 1 <= size_bytes <= MAX_TRANSFER_BYTES or len(chunks) != -(-size_bytes // chunk_bytes):
        raise ValueError(f"{name}: {len(chunks)} chunks of {chunk_bytes} bytes do not make {size_bytes}")
    if not is_sha256(sha256):
        raise ValueError(f"{name}: there is no sha256 of it")
    has_base = "base_sha256" in custom
    return Transfer(
        name,
        size_bytes,
        sha256,
        _hash(custom, "result_sha256", name),
        _whole(custom, "result_size_bytes", 0, MAX_TRANSFER_BYTES),
        chunk_bytes,
        tuple(chunks),
        _hash(custom, "base_sha256", name) if has_base else None,
        _whole(custom, "base_size_bytes", 0, MAX_TRANSFER_BYTES) if has_base else 0,
    )


def _whole(custom: Mapping[str, Any], key: str, low: int, high: int) -> int:
    value = custom.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{key}: {value!r} is not a number from {low} to {high}")
    return value


def _hash(custom: Mapping[str, Any], key: str, name: str) -> str:
    value = custom.get(key)
    if not isinstance(value, str) or not is_sha256(value):
        raise ValueError(f"{name}: {key} is not a sha256")
    return value

"""What a fuzzer's bytes do to the delta codec, and what must hold whatever they are.

The first byte chooses. Even: the rest is a delta against a fixed base, as it is or, with bit 1, with the base's hash
and the checksum made right, so that what lies behind those checks is reached. Odd: the rest is two files, and the
delta between them has to bring the second one back. Raises on any exception but the named errors, on a file left by a
refused delta, and on a wrong byte.
"""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path

from agent.contract.errors import OperationError
from agent.delta.apply import FAULTS, apply_delta
from agent.delta.encode import Effort, encode_delta
from agent.delta.format import HEADER_BYTES, TRAILER_BYTES
from agent.delta.stream import file_chunks

BASE = bytes(range(256)) * 64 + b"the quick brown fox\n" * 200
BASE_SHA256 = hashlib.sha256(BASE).hexdigest()
# A result may be as large as its header says; what is tried here stays small enough to be quick.
MAX_RESULT_BYTES = 1 << 20


def sealed(delta: bytes) -> bytes:
    """The delta with its base named and its checksum right."""
    body = bytearray(delta[: max(HEADER_BYTES, len(delta) - TRAILER_BYTES)].ljust(HEADER_BYTES, b"\0"))
    body[0:12] = b"AVODELTA\1\0\1\0"
    body[20:64] = bytes(4) + len(BASE).to_bytes(8, "little") + bytes.fromhex(BASE_SHA256)
    return bytes(body) + zlib.crc32(body).to_bytes(4, "little")


def try_delta(folder: Path, delta: bytes) -> None:
    if int.from_bytes(delta[64:72], "little") > MAX_RESULT_BYTES:
        delta = delta[:64] + (MAX_RESULT_BYTES).to_bytes(8, "little") + delta[72:]
    out = folder / "out"
    try:
        apply_delta(folder / "base", [delta[at : at + 97] for at in range(0, len(delta), 97)], out)
    except OperationError as error:
        if error.code not in FAULTS:
            raise
        if out.exists():
            raise AssertionError("a refused delta left a file behind") from error
        return
    if hashlib.sha256(out.read_bytes()).digest() != delta[72:104]:
        raise AssertionError("the result is not what the header promises")


def try_pair(folder: Path, data: bytes) -> None:
    size = int.from_bytes(data[:2], "little")
    old, new = data[2 : 2 + size], data[2 + size :]
    (folder / "old").write_bytes(old)
    (folder / "new").write_bytes(new)
    encode_delta(folder / "old", folder / "new", folder / "delta", effort=Effort.QUICK)
    apply_delta(folder / "old", file_chunks(folder / "delta"), folder / "back")
    if (folder / "back").read_bytes() != new:
        raise AssertionError("the delta made another file")


def try_input(folder: Path, data: bytes) -> None:
    """One input, with `folder` to write in."""
    if not (folder / "base").exists():
        (folder / "base").write_bytes(BASE)
    choice, rest = (data[0] if data else 0), data[1:]
    if choice & 1:
        try_pair(folder, rest)
    else:
        try_delta(folder, sealed(rest) if choice & 2 else rest)

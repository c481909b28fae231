"""Image transfers: swapped on the way, or signed by a release key and still no transfer."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable

from agent.contract.errors import ErrorCode, OperationError
from agent.delta import zstd
from agent.delta.format import DeltaInfo, Op, OpKind, pack_header, pack_op, pack_trailer
from agent.host.transfers import describe_transfer
from tests.hostile.attacks import answered, removed
from tests.hostile.board import Stage, extension, image
from tests.hostile.case import Case
from tests.hostile.cases.servers import redirects, unavailable

SIZE = 700_000
NAME = f"{extension(image(1, SIZE)).image_id}.full"
INVALID = ErrorCode.DELTA_INVALID
AGAIN = "Deploy again; if it happens again, look at what stands between this board and the repository."
WHOLE = "Check that this address serves the whole of a published repository."


def publish_one(stage: Stage) -> None:
    stage.publish(image(1, SIZE))


def offer_transfer(stage: Stage, data: bytes) -> None:
    """Another transfer file under the same name, signed as the honest publisher's keys would."""
    path = stage.repository / "targets" / f"{hashlib.sha256(data).hexdigest()}.{NAME}"
    path.write_bytes(data)
    try:
        described = describe_transfer(path, NAME)
    except OperationError:  # it is none
        described = None
    wanted = extension(image(1, SIZE))
    chunks = [hashlib.sha256(data[at : at + 262144]).hexdigest() for at in range(0, len(data), 262144)]
    fields = described.custom() if described else {"format": 1, "chunk_bytes": 262144, "chunk_sha256": chunks}
    fields |= {"result_sha256": wanted.sha256, "result_size_bytes": wanted.size_bytes}
    entry = {"length": len(data), "hashes": {"sha256": hashlib.sha256(data).hexdigest()}, "custom": fields}
    stage.edit("releases", lambda signed: signed["targets"].update({NAME: entry}))


def crafted(*ops: tuple[Op, bytes], result: bytes) -> bytes:
    """A transfer with a right checksum, whatever its operations say."""
    body = pack_header(DeltaInfo(None, 0, hashlib.sha256(result).hexdigest(), len(result)))
    for op, payload in ops:
        body += pack_op(op, 0) + payload
    body += pack_op(Op(OpKind.END, 0), 0)
    return body + pack_trailer(zlib.crc32(body))


def data(content: bytes, result: bytes, length: int = SIZE) -> bytes:
    """One operation that makes `length` bytes out of a frame of `content`."""
    payload = zstd.compress(content, 3)
    return crafted((Op(OpKind.DATA, length, payload_bytes=len(payload)), payload), result=result)


def honest() -> bytes:
    return data(image(1, SIZE), image(1, SIZE))


def with_header(at: int, changed: bytes) -> bytes:
    """The honest transfer with other bytes in its header, and a checksum that agrees."""
    body = bytearray(honest()[:-4])
    body[at : at + len(changed)] = changed
    return bytes(body) + pack_trailer(zlib.crc32(bytes(body)))


def changed_byte(stage: Stage) -> None:
    path = stage.target_file(".full")
    content = bytearray(path.read_bytes())
    content[300_000] ^= 1
    path.write_bytes(content)


def signed_as(make: Callable[[], bytes], why: str, code: ErrorCode = INVALID, remedy: str = "") -> Case:
    """What a release key signed, and the decoder does not take."""
    return Case(
        by="release thief", honest=publish_one, attack=lambda stage: offer_transfer(stage, make()), asks="image",
        code=code, message=f"cannot apply the delta: {why}", remedy=remedy,
    )  # fmt: skip


CASES = {
    "zstd bomb": signed_as(
        lambda: data(bytes(1 << 28), image(1, SIZE)),
        "a segment does not decompress: a frame of 700000 bytes names 268435456",
    ),
    "frame that makes too little": signed_as(
        lambda: data(image(1, SIZE)[:-1], image(1, SIZE)),
        "a segment does not decompress: a frame of 700000 bytes names 699999",
    ),
    "without its end": signed_as(lambda: honest()[:-5], "it is cut short"),
    "garbage behind the end": signed_as(lambda: honest() + b"\0", "bytes follow its end"),
    "a checksum that does not agree": signed_as(
        lambda: honest()[:-4] + b"\0\0\0\0", "its checksum does not match its bytes"
    ),
    "a segment of 4 GiB": signed_as(
        lambda: data(image(1, SIZE), image(1, SIZE), 1 << 32),
        "an operation makes 4294967296 bytes where 700000 are left",
    ),
    "a header that asks for 2 GiB of memory": signed_as(
        lambda: with_header(12, (1 << 31).to_bytes(4, "little")),
        "it asks for segments of 2147483648 and windows of 4194304 bytes",
    ),
    "a format of another age": signed_as(
        lambda: with_header(8, b"\x09\0"),
        "format 9, this agent reads format 1",
        ErrorCode.NEWER_SCHEMA,
        "Update the avocado-agent extension first.",
    ),
    "lies about its result": signed_as(
        lambda: data(image(0, SIZE), image(1, SIZE)),
        "the result's hash is not the one the header promises",
        ErrorCode.DELTA_WRONG_RESULT,
    ),
    "not a delta": signed_as(lambda: b"#!/bin/sh\n" * 100, "it does not begin as a delta does"),
    "makes another image": Case(
        by="release thief", honest=publish_one, asks="image",
        attack=lambda stage: offer_transfer(stage, data(image(0, SIZE), image(0, SIZE))),
        code=ErrorCode.ENTRY_INVALID,
        message=f"cannot use {NAME}: its header does not say what its signed entry says",
        remedy="Publish again with avocadoctl, and look at who else holds a release key.",
    ),
    "a changed byte": Case(
        by="mirror", honest=publish_one, attack=changed_byte, asks="image",
        code=ErrorCode.HASH_MISMATCH,
        message=f"cannot use {NAME}: bytes 262144 to 524287 do not match their signed hash", remedy=AGAIN,
    ),
    "a file that is longer than signed": Case(
        by="mirror", honest=publish_one, asks="image",
        attack=lambda stage: stage.target_file(".full").write_bytes(stage.target_file(".full").read_bytes() + b"<!-->"),
        code=ErrorCode.LENGTH_MISMATCH,
        message="cannot fetch {url}/targets/{full}: it is {full_bytes} bytes, {full_signed} are signed",
        remedy="Publish again, or look at what stands between this board and the repository.",
    ),
    "a file that is cut short": Case(
        by="mirror", honest=publish_one, asks="image",
        attack=lambda stage: stage.target_file(".full").write_bytes(stage.target_file(".full").read_bytes()[:-1]),
        code=ErrorCode.LENGTH_MISMATCH,
        message="cannot fetch {url}/targets/{full}: it is {full_bytes} bytes, {full_signed} are signed",
        remedy="Publish again, or look at what stands between this board and the repository.",
    ),
    "a file that is hidden": Case(
        by="network", honest=publish_one, attack=removed("targets/*.full"), asks="image",
        code=ErrorCode.REPOSITORY_INCOMPLETE,
        message="cannot fetch {url}/targets/{full_entry}: the server answers 404", remedy=WHOLE,
    ),
    "a file that redirects": Case(
        by="network", honest=publish_one, attack=answered(".full", redirects), asks="image",
        code=ErrorCode.FETCH_REDIRECTED,
        message="cannot fetch {url}/targets/{full}: the server redirects (302), and redirects are not followed",
        remedy="Name the address that it redirects to, if that is yours.",
    ),
    "a file that is never there": Case(
        by="network", honest=publish_one, attack=answered(".full", unavailable), asks="image",
        code=ErrorCode.SERVER_UNAVAILABLE, message="cannot fetch {url}/targets/{full}: the server answers 503",
        remedy="Look at the server's log, or try later.",
    ),
}  # fmt: skip

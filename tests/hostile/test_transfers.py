"""Transfers that are not what was signed, or signed by somebody who means harm: no image, no part, bounded memory."""

from __future__ import annotations

import hashlib
import resource
import tracemalloc
import zlib

import pytest

from agent.contract.errors import ErrorCode
from agent.delta import zstd
from agent.delta.format import DeltaInfo, Op, OpKind, pack_header, pack_op, pack_trailer
from agent.host.transfers import describe_transfer
from tests.hostile.board import Stage, extension, image, refused
from tests.hostile.server import Server

SIZE = 700_000
AGAIN = "Deploy again; if it happens again, look at what stands between this board and the repository."


def swap_transfer(stage: Stage, suffix: str, data: bytes, **custom: object) -> None:
    """Another transfer file under the same name, signed as the honest publisher's keys would."""
    old = stage.target_file(suffix)
    name = old.name.partition(".")[2]
    path = stage.repository / "targets" / f"{hashlib.sha256(data).hexdigest()}.{name}"
    path.write_bytes(data)
    described = describe_transfer(path, name) if data.startswith(b"AVODELTA") else None
    wanted = extension(image(1, SIZE))
    chunks = [hashlib.sha256(data[at : at + 262144]).hexdigest() for at in range(0, len(data), 262144)]
    fields = described.custom() if described else {"format": 1, "chunk_bytes": 262144, "chunk_sha256": chunks}
    fields |= {"result_sha256": wanted.sha256, "result_size_bytes": wanted.size_bytes, **custom}
    entry = {"length": len(data), "hashes": {"sha256": hashlib.sha256(data).hexdigest()}, "custom": fields}
    stage.edit("targets", lambda signed: signed["targets"].update({name: entry}))


def crafted(*ops: tuple[Op, bytes], result: bytes) -> bytes:
    body = pack_header(DeltaInfo(None, 0, hashlib.sha256(result).hexdigest(), len(result)))
    for op, payload in ops:
        body += pack_op(op, 0) + payload
    body += pack_op(Op(OpKind.END, 0), 0)
    return body + pack_trailer(zlib.crc32(body))


def bomb() -> bytes:
    payload = zstd.compress(bytes(1 << 28), 3)
    return crafted((Op(OpKind.DATA, SIZE, payload_bytes=len(payload)), payload), result=image(1, SIZE))


def honest_without_its_end() -> bytes:
    payload = zstd.compress(image(1, SIZE), 3)
    return crafted((Op(OpKind.DATA, SIZE, payload_bytes=len(payload)), payload), result=image(1, SIZE))[:-5]


def lies_about_its_result() -> bytes:
    payload = zstd.compress(image(0, SIZE), 3)
    return crafted((Op(OpKind.DATA, SIZE, payload_bytes=len(payload)), payload), result=image(1, SIZE))


def makes_another_image() -> bytes:
    payload = zstd.compress(image(0, SIZE), 3)
    return crafted((Op(OpKind.DATA, SIZE, payload_bytes=len(payload)), payload), result=image(0, SIZE))


INVALID = {
    "zstd bomb": (bomb, "a segment does not decompress: a frame of 700000 bytes names 268435456"),
    "without its end": (honest_without_its_end, "it is cut short"),
    "lies about its result": (lies_about_its_result, "the result's hash is not the one the header promises"),
    "makes another image": (makes_another_image, "its header does not say what its signed entry says"),
    "not a delta": (lambda: b"#!/bin/sh\n" * 100, "it does not begin as a delta does"),
}


@pytest.mark.parametrize("name", INVALID)
def test_a_signed_transfer_that_is_no_transfer_makes_nothing(stage: Stage, server: Server, name: str) -> None:
    make, why = INVALID[name]
    stage.publish(image(1, SIZE))
    swap_transfer(stage, ".full", make())
    source = stage.source(server.url)
    wanted = source.manifest().extensions[0]
    source.transfer_sizes(wanted, [])
    (stage.state / "images").mkdir()
    before = stage.snapshot()
    tracemalloc.start()
    error = refused(lambda: source.fetch(wanted, [], lambda done, total: None))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (error.code, error.message) == (ErrorCode.DELTA_INVALID, f"cannot apply the delta: {why}")
    assert stage.snapshot() == before
    assert peak < 8 << 20


def test_a_changed_byte_never_reaches_the_decoder(stage: Stage, server: Server) -> None:
    stage.publish(image(1, SIZE))
    path = stage.target_file(".full")
    name = path.name.partition(".")[2]
    data = bytearray(path.read_bytes())
    data[300_000] ^= 1
    path.write_bytes(data)
    source = stage.source(server.url)
    wanted = source.manifest().extensions[0]
    (stage.state / "images").mkdir()
    before = stage.snapshot()
    error = refused(lambda: source.fetch(wanted, [], lambda done, total: None))
    assert (error.code, error.remedy) == (ErrorCode.HASH_MISMATCH, AGAIN)
    assert error.message == f"cannot use {name}: bytes 262144 to 524287 do not match their signed hash"
    assert stage.snapshot() == before


def test_a_file_of_another_length_is_refused(stage: Stage, server: Server) -> None:
    stage.publish(image(1, SIZE))
    path = stage.target_file(".full")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + b"\n<!-- served by edge-17 -->")
    source = stage.source(server.url)
    wanted = source.manifest().extensions[0]
    error = refused(lambda: source.fetch(wanted, [], lambda done, total: None))
    assert error.code is ErrorCode.FETCH_FAILED
    assert error.message == f"cannot fetch {server.url}/targets/{path.name}: it is {size + 27} bytes, {size} are signed"
    assert stage.store.image_ids() == []


def test_an_image_nobody_offers_is_named(stage: Stage, server: Server) -> None:
    offered = stage.publish(image(1, SIZE))
    name = stage.target_file(".full").name.partition(".")[2]
    stage.edit("targets", lambda signed: signed["targets"].pop(name))
    error = refused(lambda: stage.source(server.url).fetch(offered.extensions[0], [], lambda done, total: None))
    assert (error.code, error.message, error.remedy) == (
        ErrorCode.NOT_FOUND,
        "cannot fetch image pose-model 1: the repository does not offer it",
        "Publish the runtime again with every image.",
    )


def test_a_damaged_delta_falls_back_to_the_full_transfer_and_says_so(stage: Stage, server: Server) -> None:
    stage.publish(image(1, SIZE), bases=[image(0, SIZE)])
    held = stage.hold(image(0, SIZE))
    path = stage.target_file(".delta")
    name = path.name.partition(".")[2]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    fetched = take(stage, server, held)
    assert (fetched.way, fetched.base_image_id) == ("full", None)
    assert fetched.note == f"cannot use {name}: bytes 0 to {len(data) - 1} do not match their signed hash"


def test_a_delta_that_is_gone_falls_back_to_the_full_transfer(stage: Stage, server: Server) -> None:
    stage.publish(image(1, SIZE), bases=[image(0, SIZE)])
    held = stage.hold(image(0, SIZE))
    path = stage.target_file(".delta")
    path.unlink()
    fetched = take(stage, server, held)
    assert fetched.way == "full"
    assert fetched.note == f"cannot fetch {server.url}/targets/{path.name}: the server answers 404"


def test_a_base_that_rotted_since_it_was_verified_falls_back_to_the_full_transfer(stage: Stage, server: Server) -> None:
    stage.publish(image(1, SIZE), bases=[image(0, SIZE)])
    held = stage.hold(image(0, SIZE))
    path = stage.store.image(held.image_id)
    assert path is not None
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff")
    fetched = take(stage, server, held)
    assert fetched.way == "full"
    assert fetched.note == "cannot apply the delta: the result's hash is not the one the header promises"


def take(stage: Stage, server: Server, held: object):  # type: ignore[no-untyped-def]
    source = stage.source(server.url)
    wanted = source.manifest().extensions[0]
    fetched = source.fetch(wanted, [held], lambda done, total: None)
    path = stage.store.image(wanted.image_id)
    assert path is not None
    assert path.read_bytes() == image(1, SIZE)
    assert not list((stage.state / "images").glob("*.p*"))
    return fetched


def test_a_disk_that_takes_no_more_leaves_no_image_and_no_part(stage: Stage, server: Server) -> None:
    stage.publish(image(1, SIZE))
    source = stage.source(server.url)
    wanted = source.manifest().extensions[0]
    part = stage.store.part(wanted.image_id)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = stage.snapshot()
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        error = refused(lambda: source.fetch(wanted, [], lambda done, total: None))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (error.code, error.message) == (ErrorCode.NO_SPACE, f"cannot write {part}: File too large")
    assert error.remedy == f"Free 700000 bytes on the file system of {part.parent}."
    assert stage.snapshot() == before


def test_progress_counts_to_the_end(stage: Stage, server: Server) -> None:
    stage.publish(image(1, SIZE))
    source = stage.source(server.url)
    wanted = source.manifest().extensions[0]
    steps: list[tuple[int, int]] = []
    source.fetch(wanted, [], lambda done, total: steps.append((done, total)))
    size = source.transfer_sizes(wanted, [])[0]
    assert steps[-1] == (size, size)
    assert steps == sorted(steps)

"""A delta that is damaged or does not fit: the full transfer takes its place, and the change says why.

Transfers that are refused altogether are in cases/transfers.py.
"""

from __future__ import annotations

import resource

from agent.contract.errors import ErrorCode
from tests.hostile.board import Stage, image, refused
from tests.hostile.server import Server

SIZE = 700_000


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

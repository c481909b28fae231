"""Memory and time that a stranger's documents may cost, whoever signed them."""

from __future__ import annotations

import time
import tracemalloc

import pytest

from agent import tuf_client
from agent.contract.errors import ErrorCode, OperationError
from agent.host.key_changes import rotate
from agent.signed_json import read_strictly
from agent.trust_state import MAX_METADATA_BYTES
from tests.hostile.board import PUBLISHED, Stage, image, refused
from tests.hostile.server import Handler, Server

SIZE = 200_000

DOCUMENTS = {
    "escapes": b'{"x":"' + b"\\u0041" * (SIZE // 6) + b'"}',
    "a string without an end": b'"' + b"\\" * SIZE,
    "brackets": b"[" * SIZE,
    "empty objects": b"[" + b",".join([b"{}"] * (SIZE // 3)) + b"]",
    "empty strings": b'["' + b'","' * (SIZE // 3) + b'"]',
    "digits": b"9" * SIZE,
    "wide characters": b'["' + "\U0001f951".encode() * (SIZE // 4) + b'"]',
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_reading_costs_a_small_multiple_of_the_document(name: str) -> None:
    data = DOCUMENTS[name]
    tracemalloc.start()
    began = time.thread_time()
    try:
        read_strictly(data, "targets.json")
    except OperationError as error:
        assert error.code is ErrorCode.METADATA_MALFORMED
        assert len(error.message) < 400
    finally:
        took = time.thread_time() - began
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 40 * len(data)
    assert took < 20  # tracing memory makes it slower by far


MOST = MAX_METADATA_BYTES
SMALL_PARTS = {
    "empty objects": b"[" + b",".join([b"{}"] * (MOST // 3)) + b"]",
    "short lists": b"[" + b",".join([b"[0]"] * (MOST // 4)) + b"]",
    "short strings": b'["' + b'","'.join([b"ab"] * (MOST // 5)) + b'"]',
}


@pytest.mark.parametrize("name", SMALL_PARTS)
def test_many_small_parts_are_refused_before_they_are_made(name: str) -> None:
    """The online key names the length of the targets, and what comes is read before its signature is looked at."""
    tracemalloc.start()
    try:
        error = refused(lambda: read_strictly(SMALL_PARTS[name], "targets.json"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (error.code, error.message) == (
        ErrorCode.METADATA_MALFORMED,
        "cannot trust targets.json: it has more than 200000 parts",
    )
    assert peak < 2 * MOST


def test_all_metadata_together_has_one_deadline(stage: Stage, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file of a long root chain comes just fast enough."""
    stage.publish(image(0))
    for _ in range(12):
        rotate(stage.keys, "online", now=PUBLISHED)
    stage.publish(image(0))
    monkeypatch.setattr(tuf_client, "REFRESH_S", 0.5)

    def slowly(handler: Handler, body: bytes) -> None:
        handler.server_state.closing.wait(0.2)
        handler.honest(body)

    server.rules["root.json"] = slowly
    before = stage.snapshot()
    error = refused(stage.source(server.url).manifest)
    assert error.code is ErrorCode.FETCH_TIMEOUT
    assert error.message.endswith("root.json: the repository's metadata took more than 0.5 s")
    assert error.remedy == "Check the connection, then deploy again."
    assert len(server.asked) < 12
    assert stage.snapshot() == before

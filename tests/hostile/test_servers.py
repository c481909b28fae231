"""A server that is not there, an address that is none, and another part of a file than was asked for.

What a server can do instead of answering is in cases/servers.py.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.contract.errors import ErrorCode, HostGoneError, OperationError
from agent.ports.fetch import HttpFetcher
from tests.hostile.board import QUICK, Stage, image, refused
from tests.hostile.cases.servers import CONNECTION, stalls
from tests.hostile.server import Handler, Rule, Server, serving

RANGE = "Let the server answer Range as RFC 9110 says, or not at all."


def test_nobody_listening_is_said(stage: Stage) -> None:
    stage.publish(image(0))
    error = refused(stage.source("http://127.0.0.1:1").manifest)
    assert (error.code, error.message, error.remedy) == (
        ErrorCode.FETCH_FAILED,
        "cannot fetch http://127.0.0.1:1/metadata/2.root.json: Connection refused",
        CONNECTION,
    )


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that answers no connection any more: its queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def of_many_addresses(monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
    """Every name stands for these ports of this machine, in this order."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)) for port in ports]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)


def test_a_name_of_a_thousand_dead_addresses_takes_the_time_of_one(
    stage: Stage, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.publish(image(0))
    of_many_addresses(monkeypatch, *[silent] * 1000)
    began = time.monotonic()
    error = refused(stage.source("http://many.invalid").manifest)
    assert time.monotonic() - began < 3 * QUICK.connect_s
    assert (error.code, error.message, error.remedy) == (
        ErrorCode.FETCH_TIMEOUT,
        "cannot fetch http://many.invalid/metadata/2.root.json: the server does not answer",
        CONNECTION,
    )


def test_a_dead_address_leaves_time_for_the_next_one(
    stage: Stage, server: Server, silent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.publish(image(0))
    of_many_addresses(monkeypatch, silent, int(server.url.rpartition(":")[2]))
    assert stage.source("http://two.invalid").manifest().target == "virtual"


def test_proxies_from_the_environment_are_ignored(
    stage: Stage, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    stage.publish(image(0))
    assert stage.source(server.url).manifest().target == "virtual"


@pytest.mark.parametrize(
    "source",
    [
        "ftp://host/x",
        "file:///etc/passwd",
        "http://",
        "http://user:secret@host/",
        "http://h/?q",
        "unix:x",
        "",
        "http://[::",
    ],
)
def test_an_address_that_is_none_is_refused(source: str) -> None:
    error = refused(lambda: HttpFetcher(source))
    assert (error.code, error.message) == (
        ErrorCode.USAGE,
        f"cannot fetch from {source!r}: it is not unix:/path, http://host or https://host",
    )


def test_a_cancelled_fetch_stops_within_a_second(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    server.rules["timestamp.json"] = stalls
    asked_at = time.monotonic() + 0.3
    source = stage.source(server.url, cancelled=lambda: time.monotonic() > asked_at)
    error = refused(source.manifest)
    assert time.monotonic() < asked_at + 1
    assert error.code is ErrorCode.CHANGE_CANCELLED
    assert error.message == f"cannot fetch {server.url}/metadata/timestamp.json: it was cancelled"


def wrong_part(shift: int) -> Rule:
    def rule(handler: Handler, body: bytes) -> None:
        asked = handler.headers.get("Range")
        start = (int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0) + shift
        handler.reply(body[start:], 206, Content_Range=f"bytes {start}-{len(body) - 1}/{len(body)}")

    return rule


def other_size(handler: Handler, body: bytes) -> None:
    handler.reply(body[9:], 206, Content_Range=f"bytes 10-{len(body)}/{len(body) + 1}")


def no_range(handler: Handler, body: bytes) -> None:
    handler.reply(body[10:], 206)


@pytest.mark.parametrize(
    ("rule", "code", "why"),
    [
        (wrong_part(7), ErrorCode.FETCH_WRONG_PART, "the answer is bytes 17 to 99 of 100, 10 onward was asked for"),
        (other_size, ErrorCode.LENGTH_MISMATCH, "it is 101 bytes, 100 are signed"),
        (no_range, ErrorCode.FETCH_WRONG_PART, "the answer does not say which part it is"),
    ],
)
def test_another_part_than_was_asked_for_is_refused(tmp_path: Path, rule: Rule, code: ErrorCode, why: str) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    with serving(tmp_path) as server:
        server.rules["file"] = rule
        fetcher = HttpFetcher(server.url, limits=QUICK)
        with pytest.raises(OperationError) as error:
            list(fetcher.get("file", 100, exact=True, offset=10))
        fetcher.close()
    assert (error.value.code, error.value.message) == (code, f"cannot fetch {server.url}/file: {why}")
    assert code is not ErrorCode.FETCH_WRONG_PART or error.value.remedy == RANGE


@pytest.mark.parametrize("rule", [wrong_part(-7), lambda handler, body: handler.reply(body)])
def test_more_than_was_asked_for_is_cut(tmp_path: Path, rule: Rule) -> None:
    (tmp_path / "file").write_bytes(bytes(range(100)))
    with serving(tmp_path) as server:
        server.rules["file"] = rule
        fetcher = HttpFetcher(server.url, limits=QUICK)
        assert b"".join(fetcher.get("file", 100, exact=True, offset=10)) == bytes(range(10, 100))
        fetcher.close()


class Hands:
    """A clock that stands still but for what is added to it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def test_what_the_board_does_with_the_bytes_is_not_the_server_s_slowness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, data = Hands(), bytes(1_000_000)
    (tmp_path / "file").write_bytes(data)
    monkeypatch.setattr("agent.ports.fetch.time", clock)
    with serving(tmp_path) as server:
        fetcher = HttpFetcher(server.url, limits=QUICK)
        got = 0
        for piece in fetcher.get("file", len(data), exact=True):
            got += len(piece)
            clock.now_s += 3600  # a slow disk
        fetcher.close()
    assert got == len(data)


def test_a_pause_ends_when_the_change_is_cancelled() -> None:
    slept: list[float] = []
    fetcher = HttpFetcher("http://x", limits=QUICK, cancelled=lambda: len(slept) == 3, sleep=slept.append)
    with pytest.raises(OperationError) as error:
        fetcher.pause(20)
    assert (error.value.code, error.value.message) == (
        ErrorCode.CHANGE_CANCELLED,
        "cannot fetch http://x: it was cancelled",
    )
    assert slept == [QUICK.slice_s] * 3


@pytest.mark.parametrize("is_there", [False, True])
def test_a_socket_that_nobody_listens_on_is_a_host_that_left(tmp_path: Path, is_there: bool) -> None:
    path = tmp_path / "receive.sock"
    if is_there:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    fetcher = HttpFetcher(f"unix:{path}", limits=QUICK)
    with pytest.raises(HostGoneError) as error:
        list(fetcher.get("file", 10))
    assert error.value.code is ErrorCode.FETCH_FAILED
    assert error.value.message == "cannot fetch unix:/file: the host left"

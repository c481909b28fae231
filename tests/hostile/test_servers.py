"""Servers that lie, stall or never end: given up within a bound, with words, and the board's state as it was."""

from __future__ import annotations

import gzip
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET

import pytest

from agent.contract.errors import ErrorCode, OperationError
from agent.ports.fetch import HttpFetcher
from tests.hostile.board import QUICK, Stage, image, refused
from tests.hostile.server import Handler, Rule, Server

TIMED_OUT = "Check the connection, then deploy again; what arrived is kept."


def redirects(handler: Handler, body: bytes) -> None:
    handler.reply(b"", 302, Location="http://127.0.0.2/elsewhere")


def unavailable(handler: Handler, body: bytes) -> None:
    handler.reply(b"<html>busy</html>", 503, Retry_After="3600")


def compresses(handler: Handler, body: bytes) -> None:
    handler.reply(gzip.compress(body), Content_Encoding="gzip")


def chunked(handler: Handler, body: bytes) -> None:
    handler.reply(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body), Content_Length="", Transfer_Encoding="chunked")


def endless(handler: Handler, body: bytes) -> None:
    handler.reply(body, Content_Length="")
    try:
        while not handler.server_state.closing.is_set():
            handler.wfile.write(bytes(65536))
    except OSError:
        pass
    handler.hang_up()


def says_a_petabyte(handler: Handler, body: bytes) -> None:
    handler.reply(body, Content_Length=str(10**15))
    handler.hang_up()


def says_two_lengths(handler: Handler, body: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.send_header("Content-Length", "1")
    handler.end_headers()
    handler.wfile.write(body)


def says_more_than_it_sends(handler: Handler, body: bytes) -> None:
    handler.reply(body[:-10], Content_Length=str(len(body)))
    handler.hang_up()


def resets(handler: Handler, body: bytes) -> None:
    handler.connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()
    handler.hang_up()


def speaks_no_http(handler: Handler, body: bytes) -> None:
    handler.wfile.write(b"220 mail.example ESMTP\r\n")
    handler.hang_up()


def thousand_headers(handler: Handler, body: bytes) -> None:
    handler.send_response(200)
    for number in range(1000):
        handler.send_header(f"X-{number}", "x")
    handler.end_headers()
    handler.hang_up()


def stalls(handler: Handler, body: bytes) -> None:
    handler.reply(body[:100], Content_Length=str(len(body)))
    handler.server_state.closing.wait(30)


def drips(handler: Handler, body: bytes) -> None:
    handler.reply(b"", Content_Length=str(len(body)))
    drip(handler, body)


def drips_headers(handler: Handler, body: bytes) -> None:
    drip(handler, b"HTTP/1.1 200 OK\r\nX-Slow: " + b"a" * 4000)


def drip(handler: Handler, data: bytes) -> None:
    try:
        for byte in data:
            handler.wfile.write(bytes([byte]))
            handler.wfile.flush()
            if handler.server_state.closing.wait(0.1):
                return
    except OSError:
        return
    finally:
        handler.hang_up()


@dataclass(frozen=True)
class Case:
    rule: Rule
    code: ErrorCode
    why: str  # follows "cannot fetch URL: "; {size} is the file's


FAILED, SLOW = ErrorCode.FETCH_FAILED, ErrorCode.FETCH_TIMEOUT
CASES = {
    "redirects": Case(redirects, FAILED, "the server redirects (302), and redirects are not followed"),
    "come back in an hour": Case(unavailable, FAILED, "the server answers 503"),
    "compresses": Case(compresses, FAILED, "the answer is compressed, which was not asked for"),
    "chunked": Case(chunked, FAILED, "the answer does not say its length"),
    "endless": Case(endless, FAILED, "the answer does not say its length"),
    "two lengths": Case(says_two_lengths, FAILED, "the answer does not say its length"),
    "a petabyte": Case(
        says_a_petabyte, ErrorCode.FETCH_TOO_LARGE, "it is 1000000000000000 bytes, at most 16384 are expected"
    ),
    "cut short": Case(says_more_than_it_sends, FAILED, "the connection ended after {short} of {size} bytes"),
    "resets": Case(resets, FAILED, "Connection reset by peer"),
    "no HTTP": Case(speaks_no_http, FAILED, "the answer is not HTTP (BadStatusLine)"),
    "a thousand headers": Case(thousand_headers, FAILED, "the answer is not HTTP (HTTPException)"),
    "stalls": Case(stalls, SLOW, "{bytes} bytes arrived in 1 s"),
    "drips": Case(drips, SLOW, "{bytes} bytes arrived in 1 s"),
    "drips headers": Case(drips_headers, SLOW, "{bytes} bytes arrived in 1 s"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_server_that_misbehaves_is_given_up(stage: Stage, server: Server, name: str) -> None:
    case = CASES[name]
    stage.publish(image(0))
    server.rules["timestamp.json"] = case.rule
    before = stage.snapshot()
    began = time.monotonic()
    error = refused(stage.source(server.url).manifest)
    assert time.monotonic() - began < 4
    size = (stage.repository / "metadata" / "timestamp.json").stat().st_size
    expected = f"cannot fetch {server.url}/metadata/timestamp.json: " + case.why.replace("{size}", str(size))
    head, _, tail = expected.replace("{short}", str(size - 10)).partition("{bytes}")
    assert error.code is case.code
    assert error.message.startswith(head)
    assert error.message.endswith(tail)
    if "{bytes}" not in case.why:
        assert error.message == head
    assert error.remedy == (TIMED_OUT if case.code is SLOW else "")
    assert stage.snapshot() == before


def test_nobody_listening_is_said(stage: Stage) -> None:
    stage.publish(image(0))
    error = refused(stage.source("http://127.0.0.1:1").manifest)
    assert (error.code, error.message) == (
        FAILED,
        "cannot fetch http://127.0.0.1:1/metadata/2.root.json: Connection refused",
    )


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
    ("rule", "why"),
    [
        (wrong_part(7), "the answer is bytes 17 to 99 of 100, 10 onward was asked for"),
        (other_size, "it is 101 bytes, 100 are signed"),
        (no_range, "the answer does not say which part it is"),
    ],
)
def test_another_part_than_was_asked_for_is_refused(tmp_path: Path, stage: Stage, rule: Rule, why: str) -> None:
    from tests.hostile.server import serving

    (tmp_path / "file").write_bytes(bytes(range(100)))
    with serving(tmp_path) as server:
        server.rules["file"] = rule
        fetcher = HttpFetcher(server.url, limits=QUICK)
        with pytest.raises(OperationError) as error:
            list(fetcher.get("file", 100, exact=True, offset=10))
        fetcher.close()
    assert (error.value.code, error.value.message) == (FAILED, f"cannot fetch {server.url}/file: {why}")


@pytest.mark.parametrize("rule", [wrong_part(-7), lambda handler, body: handler.reply(body)])
def test_more_than_was_asked_for_is_cut(tmp_path: Path, rule: Rule) -> None:
    from tests.hostile.server import serving

    (tmp_path / "file").write_bytes(bytes(range(100)))
    with serving(tmp_path) as server:
        server.rules["file"] = rule
        fetcher = HttpFetcher(server.url, limits=QUICK)
        assert b"".join(fetcher.get("file", 100, exact=True, offset=10)) == bytes(range(10, 100))
        fetcher.close()

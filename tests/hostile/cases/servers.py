"""Servers that lie, stall or never end, and whoever sits on the wire."""

from __future__ import annotations

import gzip
import struct
import zlib
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

from agent.contract.errors import ErrorCode
from tests.hostile.attacks import answered
from tests.hostile.board import Stage
from tests.hostile.case import Attack, Case
from tests.hostile.server import Handler, Rule

SLOW = ErrorCode.FETCH_TIMEOUT
CONNECTION = "Check the connection, then deploy again; what arrived is kept."
LENGTH = "Let the server send Content-Length, as it does for plain files."
PORT = "Check the address and its port."


def redirects(handler: Handler, body: bytes) -> None:
    handler.reply(b"", 302, Location="http://127.0.0.2/elsewhere")


def redirects_to_a_file(handler: Handler, body: bytes) -> None:
    handler.reply(b"", 307, Location="file:///etc/passwd")


def unavailable(handler: Handler, body: bytes) -> None:
    handler.reply(b"<html>busy</html>", 503, Retry_After="3600")


def compresses(handler: Handler, body: bytes) -> None:
    handler.reply(gzip.compress(body), Content_Encoding="gzip")


def gzip_bomb(stage: Stage) -> None:
    bomb = zlib.compressobj(wbits=31)
    pieces = [bomb.compress(bytes(1 << 20)) for _ in range(256)]  # piecewise: this process is the one that is measured
    data = b"".join([*pieces, bomb.flush()])

    def rule(handler: Handler, body: bytes) -> None:
        handler.reply(data, Content_Encoding="gzip")

    stage.server.rules["timestamp.json"] = rule


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


def says_minus_one(handler: Handler, body: bytes) -> None:
    handler.reply(body, Content_Length="-1")


def says_it_in_other_digits(handler: Handler, body: bytes) -> None:
    """Arabic digits, which Python's int() takes."""
    handler.send_response(200)
    handler.wfile.write(b"".join([*handler._headers_buffer, "Content-Length: \u0661\u0660\r\n\r\n".encode()]))  # type: ignore[attr-defined]
    handler._headers_buffer = []  # type: ignore[attr-defined]
    handler.hang_up()


def says_two_lengths(handler: Handler, body: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.send_header("Content-Length", "1")
    handler.end_headers()
    handler.wfile.write(body)


def says_more_than_it_sends(handler: Handler, body: bytes) -> None:
    handler.reply(body[:100], Content_Length="200")
    handler.hang_up()


def answers_a_part(handler: Handler, body: bytes) -> None:
    handler.reply(body[10:], 206, Content_Range=f"bytes 10-{len(body) - 1}/{len(body)}")


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


def header_of_a_megabyte(handler: Handler, body: bytes) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * (1 << 20) + b"\r\n\r\n")
    handler.hang_up()


def stalls(handler: Handler, body: bytes) -> None:
    handler.reply(body[:100], Content_Length=str(len(body)))
    handler.server_state.closing.wait(30)


def says_nothing(handler: Handler, body: bytes) -> None:
    handler.server_state.closing.wait(30)
    handler.hang_up()


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


def huge_snapshot(stage: Stage) -> None:
    """The online key signs a snapshot of a terabyte, and the server begins to send it."""
    stage.edit("timestamp", lambda signed: signed["meta"]["snapshot.json"].update(length=10**12))
    stage.server.rules["snapshot.json"] = flood


def flood(handler: Handler, body: bytes) -> None:
    """A terabyte is promised, and sent as long as anybody reads."""
    handler.reply(b"", Content_Length=str(10**12))
    try:
        while not handler.server_state.closing.is_set():
            handler.wfile.write(bytes(1 << 20))
    except OSError:
        handler.hang_up()


def lying(rule: Rule, code: ErrorCode, why: str, remedy: str, **more: Any) -> Case:
    """What happens instead of the timestamp."""
    attack: Attack = answered("timestamp.json", rule)
    message = f"cannot fetch {{url}}/metadata/timestamp.json: {why}"
    return Case(by="network", attack=attack, code=code, message=message, remedy=remedy, **more)


CASES = {
    "redirects": lying(
        redirects, ErrorCode.FETCH_REDIRECTED, "the server redirects (302), and redirects are not followed",
        "Name the address that it redirects to, if that is yours.",
    ),
    "redirects to a file of the board": lying(
        redirects_to_a_file, ErrorCode.FETCH_REDIRECTED,
        "the server redirects (307), and redirects are not followed",
        "Name the address that it redirects to, if that is yours.",
    ),
    "come back in an hour": lying(
        unavailable, ErrorCode.SERVER_UNAVAILABLE, "the server answers 503", "Look at the server's log, or try later."
    ),
    "compresses": lying(
        compresses, ErrorCode.FETCH_COMPRESSED, "the answer is compressed, which was not asked for",
        "Let the server send the repository's files as they are.",
    ),
    "gzip bomb": Case(
        by="network", attack=gzip_bomb,
        code=ErrorCode.FETCH_COMPRESSED,
        message="cannot fetch {url}/metadata/timestamp.json: the answer is compressed, which was not asked for",
        remedy="Let the server send the repository's files as they are.",
    ),
    "chunked": lying(chunked, ErrorCode.FETCH_UNBOUNDED, "the answer does not say its length", LENGTH),
    "endless": lying(endless, ErrorCode.FETCH_UNBOUNDED, "the answer does not say its length", LENGTH),
    "two lengths": lying(says_two_lengths, ErrorCode.FETCH_UNBOUNDED, "the answer does not say its length", LENGTH),
    "a length below zero": lying(
        says_minus_one, ErrorCode.FETCH_UNBOUNDED, "the answer does not say its length", LENGTH
    ),
    "a length in other digits": lying(
        says_it_in_other_digits, ErrorCode.FETCH_UNBOUNDED, "the answer does not say its length", LENGTH
    ),
    "a petabyte": lying(
        says_a_petabyte, ErrorCode.FETCH_TOO_LARGE, "it is 1000000000000000 bytes, at most 16384 are expected",
        "Check that this address serves a published repository.",
    ),
    "a terabyte of snapshot under the online key's signature": Case(
        by="online thief", attack=huge_snapshot, clause="5.5.1",
        code=ErrorCode.FETCH_TOO_LARGE,
        message="cannot fetch {url}/metadata/{snapshot}: it is 1000000000000 bytes, at most 65536 are expected",
        remedy="Check that this address serves a published repository.",
    ),
    "a part instead of the whole": lying(
        answers_a_part, ErrorCode.FETCH_WRONG_PART, "the answer is a part, and the whole was asked for",
        "Let the server answer Range as RFC 9110 says, or not at all.",
    ),
    "answer cut short": lying(
        says_more_than_it_sends, ErrorCode.FETCH_FAILED, "the connection ended after 100 of 200 bytes", CONNECTION
    ),
    "resets": lying(resets, ErrorCode.FETCH_FAILED, "Connection reset by peer", CONNECTION),
    "no HTTP": lying(speaks_no_http, ErrorCode.NOT_HTTP, "the answer is not HTTP (BadStatusLine)", PORT),
    "a thousand headers": lying(thousand_headers, ErrorCode.NOT_HTTP, "the answer is not HTTP (HTTPException)", PORT),
    "a header of a megabyte": lying(
        header_of_a_megabyte, ErrorCode.NOT_HTTP, "the answer is not HTTP (LineTooLong)", PORT
    ),
    "stalls": lying(stalls, SLOW, "{n} bytes arrived in {n} s", CONNECTION),
    "says nothing": lying(says_nothing, SLOW, "{n} bytes arrived in {n} s", CONNECTION),
    "drips": lying(drips, SLOW, "{n} bytes arrived in {n} s", CONNECTION),
    "drips headers": lying(drips_headers, SLOW, "{n} bytes arrived in {n} s", CONNECTION),
}  # fmt: skip

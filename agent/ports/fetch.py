"""Reads files from one HTTP server that may be broken, slow or hostile: over a unix socket, TCP or TLS.

One persistent connection, `GET` with `Range`, and nothing else. Which answers are taken is answer.py. Proxies from the
environment are not followed. A server that stalls, or drips a byte now and then, is given up after a bounded time of
waiting for it: a timeout per read would bound nothing, and what the board does with the bytes is not the server's
slowness. Every failure is an OperationError that names the address and how far it came.
"""

from __future__ import annotations

import http.client
import io
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from agent.contract.errors import ErrorCode, HostGoneError, OperationError
from agent.ports.answer import CHECK_CONNECTION, accept, failed

_PIECE_BYTES = 64 * 1024
_DRAIN_BYTES = 4 << 20

_TIMESTAMP_BYTES = 16 * 1024
_LOG = logging.getLogger("avocado.fetch")


@dataclass(frozen=True, slots=True)
class Limits:
    """How slow a server may be, in seconds of waiting for it. `window_bytes` must arrive in every `window_s`."""

    connect_s: float = 15.0
    window_s: float = 20.0
    window_bytes: int = 4096
    # A whole answer may take this long, and longer by its size at the least rate.
    answer_s: float = 60.0
    least_bytes_per_s: int = 2048
    # How soon a cancellation is noticed while nothing arrives.
    slice_s: float = 0.5


class HttpFetcher:
    """The Fetcher port over HTTP/1.1. `source`: `unix:/path`, `http://host[:port][/base]` or `https://...`."""

    def __init__(
        self,
        source: str,
        *,
        limits: Limits | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        sleep: Callable[[float], None] = time.sleep,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._limits = limits or Limits()
        self._cancelled = cancelled
        self._sleep = sleep
        self._received = 0
        self._connection: http.client.HTTPConnection | None = None
        self._connect, self._base, self._shown = _endpoint(source, self._limits, tls)

    def get(self, path: str, limit: int, *, exact: bool = False, offset: int = 0) -> Iterator[bytes]:
        """The bytes of a file from `offset` on. See the protocol."""
        url = f"{self._shown}/{path}"
        pace = _Pace(url, self._limits, limit, self._cancelled)
        response: http.client.HTTPResponse | None = None
        kept = False
        try:
            with _translated(url):
                response = self._request(f"{self._base}/{path}", offset, pace)
                left, skip = accept(response, url, limit, exact=exact, offset=offset)
                total = left
                while left:
                    piece = response.read1(min(_PIECE_BYTES, left))
                    if not piece:
                        raise failed(url, f"the connection ended after {total - left} of {total} bytes")
                    left -= len(piece)
                    self._received += len(piece)
                    if skip >= len(piece):
                        skip -= len(piece)
                        continue
                    yield piece[skip:]
                    skip = 0
                response.close()
            kept = True
        except OperationError as error:
            kept = error.code is ErrorCode.NOT_FOUND and self._drained(response)
            raise
        except GeneratorExit:
            kept = self._drained(response)
            raise
        finally:
            if not kept:
                if response is not None:
                    response.close()
                self.close()

    def _drained(self, response: http.client.HTTPResponse | None) -> bool:
        """Read the rest of an answer nobody wants. A deploy over ssh has one connection: closing it ends the deploy."""
        if response is None or response.length is None or response.length > _DRAIN_BYTES:
            return False
        try:
            while response.length:
                piece = response.read1(_PIECE_BYTES)
                if not piece:
                    return False
                self._received += len(piece)
        except (OperationError, OSError, http.client.HTTPException):
            return False
        response.close()
        return True

    def pause(self, seconds: float) -> None:
        """Nothing is asked for so long. See the protocol."""
        while seconds > 0:
            if self._cancelled():
                raise _cancellation(self._shown)
            self._sleep(min(seconds, self._limits.slice_s))
            seconds -= self._limits.slice_s

    def received_bytes(self) -> int:
        """Every byte of every answer's body so far."""
        return self._received

    def close(self) -> None:
        """The connection is gone."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _request(self, target: str, offset: int, pace: _Pace) -> http.client.HTTPResponse:
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        reused = self._connection is not None
        try:
            return self._ask(target, headers, pace)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            # A server may close an idle connection; that says nothing about this request.
            self.close()
            if not reused:
                raise
            return self._ask(target, headers, pace)

    def _ask(self, target: str, headers: dict[str, str], pace: _Pace) -> http.client.HTTPResponse:
        if self._connection is None or self._connection.sock is None:  # None: the server wanted to close
            self._connection = self._connect()
        connection = self._connection
        cast("_PacedSocket", connection.sock).pace = pace
        connection.request("GET", target, headers=headers)
        return connection.getresponse()


def answers(server: HttpFetcher) -> bool:
    """Whether the repository answers, over this connection, which is closed then."""
    try:
        for _ in server.get("metadata/timestamp.json", _TIMESTAMP_BYTES):
            pass
    except OperationError as error:
        _LOG.info("%s", error.message)
        return False
    finally:
        server.close()
    return True


class _translated:  # noqa: N801 (reads as a word where it is used)
    """Turn what sockets and http.client raise into OperationError."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, cause: BaseException | None, trace: Any) -> None:
        if isinstance(cause, TimeoutError):
            raise OperationError(
                ErrorCode.FETCH_TIMEOUT, f"cannot fetch {self._url}: the server does not answer", CHECK_CONNECTION
            ) from cause
        if isinstance(cause, ConnectionRefusedError | FileNotFoundError) and self._url.startswith("unix:"):
            raise HostGoneError(
                ErrorCode.FETCH_FAILED, f"cannot fetch {self._url}: the host left", CHECK_CONNECTION
            ) from cause
        if isinstance(cause, OSError):
            raise failed(self._url, cause.strerror or str(cause)) from cause
        if isinstance(cause, http.client.HTTPException):
            raise OperationError(
                ErrorCode.NOT_HTTP,
                f"cannot fetch {self._url}: the answer is not HTTP ({type(cause).__name__})",
                "Check the address and its port.",
            ) from cause


def _cancellation(url: str) -> OperationError:
    return OperationError(ErrorCode.CHANGE_CANCELLED, f"cannot fetch {url}: it was cancelled")


class _Pace:
    """Gives up on one answer: too slow over a window, too long in all, or cancelled."""

    def __init__(self, url: str, limits: Limits, size: int, cancelled: Callable[[], bool]) -> None:
        self._url = url
        self._limits = limits
        self._cancelled = cancelled
        self._allowed_s = limits.answer_s + size / limits.least_bytes_per_s
        self._waited_s = 0.0  # in this window, as is what arrived
        self._arrived = 0
        self._waited_in_all_s = 0.0
        self._total = 0

    def check(self) -> None:
        if self._cancelled():
            raise _cancellation(self._url)
        if self._waited_in_all_s > self._allowed_s:
            self._give_up()

    def waited(self, seconds: float, count: int) -> None:
        self._waited_s += seconds
        self._waited_in_all_s += seconds
        self._arrived += count
        self._total += count
        if self._waited_s >= self._limits.window_s:
            if self._arrived < self._limits.window_bytes:
                self._give_up()
            self._waited_s, self._arrived = 0.0, 0

    def _give_up(self) -> None:
        raise OperationError(
            ErrorCode.FETCH_TIMEOUT,
            f"cannot fetch {self._url}: {self._total} bytes arrived in {self._waited_in_all_s:.0f} s",
            CHECK_CONNECTION,
        )


class _PacedSocket:
    """What http.client needs of a socket, with every wait sliced and paced."""

    def __init__(self, sock: socket.socket, limits: Limits) -> None:
        self._sock = sock
        self._limits = limits
        self._readers = 0
        self._closed = False
        self.pace: _Pace | None = None

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(self._limits.window_s)
        self._sock.sendall(data)

    def makefile(self, _mode: str) -> io.BufferedReader:
        self._readers += 1
        return io.BufferedReader(_PacedReader(self), _PIECE_BYTES)

    def receive_into(self, buffer: Any) -> int:
        pace = self.pace
        assert pace is not None  # noqa: S101 (set before every request)
        self._sock.settimeout(self._limits.slice_s)
        while True:
            pace.check()
            began = time.monotonic()
            try:
                count = self._sock.recv_into(buffer)
            except TimeoutError:
                count = -1
            pace.waited(time.monotonic() - began, max(count, 0))
            if count >= 0:
                return count

    def close(self) -> None:
        """As sockets do: an answer that is still being read keeps it open."""
        self._closed = True
        if not self._readers:
            self._sock.close()

    def reader_closed(self) -> None:
        self._readers -= 1
        if self._closed:
            self.close()


class _PacedReader(io.RawIOBase):
    def __init__(self, sock: _PacedSocket) -> None:
        super().__init__()
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._sock.receive_into(buffer)

    def close(self) -> None:
        if not self.closed:
            self._sock.reader_closed()
        super().close()


def _endpoint(
    source: str, limits: Limits, tls: ssl.SSLContext | None
) -> tuple[Callable[[], http.client.HTTPConnection], str, str]:
    """How to connect, the path every target begins with, and how the server is named in messages."""
    if source.startswith("unix:/"):
        path = source.removeprefix("unix:")
        return lambda: _connected("localhost", _unix_socket(path, limits), limits), "", "unix:"
    try:
        parts = urlsplit(source)
        host, port = parts.hostname, parts.port
    except ValueError:
        parts, host, port = urlsplit(""), None, None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or "@" in parts.netloc:
        raise OperationError(
            ErrorCode.USAGE,
            f"cannot fetch from {source!r}: it is not unix:/path, http://host or https://host",
        )
    secure = parts.scheme == "https"
    address = (host, port or (443 if secure else 80))

    def connect() -> http.client.HTTPConnection:
        sock = _tcp_socket(address, limits.connect_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if secure:
            # The timeout bounds the whole handshake, not one read of it.
            sock = (tls or ssl.create_default_context()).wrap_socket(sock, server_hostname=host)
        return _connected(parts.netloc, sock, limits)

    return connect, parts.path.rstrip("/"), f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


def _tcp_socket(address: tuple[str, int], limit_s: float) -> socket.socket:
    """A connection to the first address that takes one. A name may stand for thousands, whoever answers for it."""
    until = time.monotonic() + limit_s
    failure: OSError = TimeoutError()
    for family, kind, protocol, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        left_s = until - time.monotonic()
        if left_s <= 0:
            break
        sock = socket.socket(family, kind, protocol)
        # Half of what is left: a dead address leaves time for the next one, and all together end in time.
        sock.settimeout(left_s / 2)
        try:
            sock.connect(where)
        except OSError as cause:
            failure = cause
            sock.close()
        else:
            sock.settimeout(limit_s)
            return sock
    raise failure


def _connected(netloc: str, sock: socket.socket, limits: Limits) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(netloc)
    connection.sock = _PacedSocket(sock, limits)
    return connection


def _unix_socket(path: str, limits: Limits) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(limits.connect_s)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock

"""The board at the other end of the user's own ssh: one question, or one session that carries a deploy.

The user's configuration, agent, jump hosts and host keys apply. What a login shell prints is skipped up to a marker,
within 64 KiB and a time limit, and shown when the marker never comes. Every way in which this fails is one message that
says what to check. ssh itself is ended after a bounded wait, since some servers never end a session by themselves.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

from agent.contract.bridge import MARKER, MAX_EVENT_BYTES, MAX_NOISE_BYTES, parse_event
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.status import MAX_BYTES as MAX_STATUS_BYTES
from agent.verbs.remote import AFRESH, ALIVE

HANDSHAKE_S = 15.0
# Someone may have to type a password first.
_HANDSHAKE_WITH_TERMINAL_S = 120.0
_STATUS_S = 30.0
_END_S = 3.0
# Written by receive about every second; ServerAlive below notices a dead link much earlier.
_SILENCE_S = 90.0
_ANSWER = "avocado-answer-follows"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x09\x0b-\x1f\x7f]")

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Board:
    """A board as ssh knows it: `[user@]host`."""

    host: str
    afresh: bool = False  # over a connection of its own, whatever the user's configuration shares

    def __post_init__(self) -> None:
        if not self.host or self.host.startswith("-") or any(c.isspace() for c in self.host):
            raise OperationError(
                ErrorCode.USAGE, f"cannot use {self.host!r} as a host", "Give it as ssh takes it: -H root@board"
            )

    def argv(self, command: str) -> list[str]:
        """The command line that hands `command` to the board's shell; no terminal, which would change bytes."""
        return ["ssh", *(AFRESH if self.afresh else ()), "-T", *ALIVE, self.host, "--", command]


async def ask(board: Board, argv: Sequence[str]) -> dict[str, Any]:
    """Run avocadoctl on the board and give the JSON object it prints. Raises `ssh-failed` or `handshake-failed`."""
    command = f"echo {_ANSWER}; {shlex.join(['avocadoctl', '-o', 'json', *argv])}"
    async with _pipe() as (answers, stdout), _pipe() as (words, stderr):
        process = await _start(board, command, asyncio.subprocess.DEVNULL, stdout, stderr)
        said = asyncio.create_task(_tail(words))
        try:
            try:
                out = await asyncio.wait_for(_bounded(answers), _patience(_STATUS_S))
            except TimeoutError as cause:
                raise _no_answer(board, b"", _patience(_STATUS_S)) from cause
            status = await _end(process)
            noise, found, answer = out.partition(_ANSWER.encode() + b"\n")
            document = _first_object(answer)
            if found and document is not None:
                return document
            # Bounded: a shared connection's master keeps standard error open after ssh itself has ended.
            await asyncio.wait({said}, timeout=_END_S)
            raise _explain(board, status, said.result() if said.done() else "", noise if not found else answer)
        finally:
            await _end(process)
            said.cancel()


class Session:
    """`avocadoctl receive` on the board: a socket that carries HTTP, and the events it tells."""

    def __init__(
        self, board: Board, process: asyncio.subprocess.Process, sock: socket.socket, words: asyncio.StreamReader
    ) -> None:
        self.board = board
        self.socket = sock
        self._process = process
        self._words = words
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._said: list[str] = []
        self._reader = asyncio.create_task(self._read_events())
        self._watcher = asyncio.create_task(self._watch_process())

    async def handshake(self) -> None:
        """Skip what the login shell prints, up to the marker. Raises `handshake-failed` or `ssh-failed`."""
        seen = bytearray()
        limit_s = _patience(HANDSHAKE_S)
        try:
            await asyncio.wait_for(self._skip_to_marker(seen), limit_s)
        except TimeoutError as cause:
            raise _no_answer(self.board, bytes(seen), limit_s) from cause
        if not seen.endswith(MARKER):
            raise await self._failure(bytes(seen))

    async def _skip_to_marker(self, seen: bytearray) -> None:
        loop = asyncio.get_running_loop()
        while not seen.endswith(MARKER):
            # One byte at a time: nothing behind the marker may be taken from the HTTP connection.
            byte = await loop.sock_recv(self.socket, 1)
            if not byte:
                return
            seen += byte
            if len(seen) > MAX_NOISE_BYTES:
                raise OperationError(
                    ErrorCode.HANDSHAKE_FAILED,
                    f"cannot talk to {self.board.host}: its login shell printed more than {MAX_NOISE_BYTES} bytes:"
                    f" {_shown(bytes(seen))}",
                    f"See what it prints: ssh -T {self.board.host} true",
                )

    async def events(self) -> AsyncIterator[Event]:
        """Every event up to the result. Raises `ssh-failed` when the connection ends, or stays silent, before it."""
        while True:
            try:
                event = await asyncio.wait_for(self._events.get(), _SILENCE_S)
            except TimeoutError as cause:
                raise OperationError(
                    ErrorCode.SSH_FAILED,
                    f"cannot follow the change on {self.board.host}: nothing heard for {_SILENCE_S:g} s",
                    f"See how it ended: avocadoctl -H {self.board.host} history",
                ) from cause
            if event is None:
                raise await self._failure(None)
            yield event
            if event["event"] == "result":
                return

    async def _read_events(self) -> None:
        try:
            while line := await self._words.readline():
                event = parse_event(line)
                if event is not None:
                    self._events.put_nowait(event)
                elif text := _clean(line.decode(errors="replace")):
                    self._said = [*self._said[-20:], text]
        finally:
            self._events.put_nowait(None)

    async def _watch_process(self) -> None:
        """A shared connection's master keeps standard error open after ssh itself has ended."""
        await self._process.wait()
        await asyncio.wait({self._reader}, timeout=_END_S)
        self._events.put_nowait(None)

    async def _failure(self, noise: bytes | None) -> OperationError:
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._reader), _END_S)
        status = await _end(self._process)
        while not self._events.empty():
            event = self._events.get_nowait()
            if event and event["event"] == "result" and event.get("error"):
                return OperationError.from_dict(event["error"])
        if noise is None:
            return OperationError(
                ErrorCode.SSH_FAILED,
                f"cannot follow the change on {self.board.host}: the connection was lost"
                + (f" ({self._said[-1]})" if self._said else ""),
                f"See how it ended: avocadoctl -H {self.board.host} history",
            )
        return _explain(self.board, status, "\n".join(self._said), noise)

    async def close(self) -> None:
        """ssh has ended, by itself or by us."""
        self.socket.close()
        await _end(self._process)
        for task in (self._reader, self._watcher):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def open_session(board: Board, argv: Sequence[str]) -> AsyncIterator[Session]:
    """Run a command on the board whose standard streams are one socket here."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours:
        async with _pipe() as (words, stderr):
            with theirs:
                process = await _start(board, shlex.join(argv), theirs, theirs, stderr)
            session = Session(board, process, ours, words)
            try:
                yield session
            finally:
                await session.close()


@asynccontextmanager
async def _pipe() -> AsyncIterator[tuple[asyncio.StreamReader, IO[bytes]]]:
    """A reader, and the file to give to a program as its output; `_start` closes it here.

    Not asyncio's own pipes: with those, waiting for a program also waits for everybody who inherited one.
    """
    read, write = os.pipe()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_EVENT_BYTES)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb"))
    output = os.fdopen(write, "wb", 0)
    try:
        yield reader, output
    finally:
        output.close()
        transport.close()


async def _start(board: Board, command: str, stdin: Any, stdout: Any, stderr: IO[bytes]) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(*board.argv(command), stdin=stdin, stdout=stdout, stderr=stderr)
    except FileNotFoundError as cause:
        raise OperationError(
            ErrorCode.TOOL_MISSING, "cannot run ssh: it is not installed", "Install OpenSSH's client."
        ) from cause
    finally:
        stderr.close()
        if stdout is not stdin:
            stdout.close()


async def _end(process: asyncio.subprocess.Process) -> int:
    """Its exit status: asked to end after a moment, made to after another."""
    for ask_to_end in (process.terminate, process.kill):
        try:
            return await asyncio.wait_for(process.wait(), _END_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                ask_to_end()
    return await process.wait()


async def _bounded(stream: asyncio.StreamReader) -> bytes:
    collected = bytearray()
    while data := await stream.read(65536):
        collected += data
        if len(collected) > MAX_STATUS_BYTES + MAX_NOISE_BYTES:
            break
    return bytes(collected)


async def _tail(stream: asyncio.StreamReader) -> str:
    collected = b""
    while data := await stream.read(65536):
        collected = (collected + data)[-8192:]
    return collected.decode(errors="replace")


def _patience(seconds: float) -> float:
    return max(seconds, _HANDSHAKE_WITH_TERMINAL_S) if sys.stdin.isatty() else seconds


def _first_object(data: bytes) -> dict[str, Any] | None:
    text = data.decode(errors="replace").lstrip()
    try:
        document, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _clean(text: str) -> str:
    return _ESCAPES.sub("", text).strip()


def _shown(noise: bytes) -> str:
    text = " ".join(_clean(noise.decode(errors="replace")).split())
    return repr(text if len(text) <= 200 else f"...{text[-200:]}")


def _no_answer(board: Board, noise: bytes, waited_s: float) -> OperationError:
    said = f"; its shell printed {_shown(noise)}" if noise else ""
    return OperationError(
        ErrorCode.HANDSHAKE_FAILED,
        f"cannot talk to {board.host}: no answer in {waited_s:g} s{said}",
        f"Check that this ends at once and prints nothing: ssh -T {board.host} true",
    )


_SSH_SAYS: Sequence[tuple[str, Callable[[str], tuple[str, str]]]] = (
    (
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        lambda host: ("its host key is another one than before", f"If it was reinstalled: ssh-keygen -R {_name(host)}"),
    ),
    ("Host key verification failed", lambda host: ("its host key is not known", f"Look at it once: ssh {host} true")),
    ("Permission denied", lambda host: ("permission denied", f"Check the user and the key: ssh {host} true")),
)


def _explain(board: Board, status: int, stderr: str, noise: bytes) -> OperationError:
    """The one message for a session that ended before it began."""
    host = board.host
    lines = [text for line in stderr.splitlines() if (text := _clean(line))]
    if status == 255:
        for sign, tell in _SSH_SAYS:
            if sign in stderr:
                why, remedy = tell(host)
                return OperationError(ErrorCode.SSH_FAILED, f"cannot log in to {host}: {why}", remedy)
        last = lines[-1] if lines else "ssh ended with status 255"
        return OperationError(ErrorCode.SSH_FAILED, f"cannot reach {host}: {last}", f"Check: ssh {host} true")
    if status == 127:
        return OperationError(
            ErrorCode.HANDSHAKE_FAILED,
            f"cannot run avocadoctl on {host}: it is not in the PATH of a non-interactive shell there",
            "Provision the board first: avocadoctl provision --help",
        )
    if any(error := _error_of(line) for line in lines):
        return next(error for line in lines if (error := _error_of(line)))
    said = f"its shell printed {_shown(noise)}" if noise.strip() else (lines[-1] if lines else "it said nothing")
    return OperationError(
        ErrorCode.HANDSHAKE_FAILED,
        f"cannot talk to avocadoctl on {host}: {said}",
        f"Check: ssh -T {host} avocadoctl status",
        {"ssh_status": status},
    )


def _error_of(line: str) -> OperationError | None:
    """An error that avocadoctl itself printed as JSON."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return OperationError.from_dict(fields) if isinstance(fields, dict) and "code" in fields else None


def _name(host: str) -> str:
    return host.rpartition("@")[2]

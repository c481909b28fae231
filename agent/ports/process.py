"""The one door to other programs: argument lists, a deadline, bounded output, and no shell.

A program gets its own process group, which is killed as a whole when the deadline passes or the output grows past its
bound, so nothing started here outlives the call. Only stdin, stdout and stderr are inherited.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from agent.contract.errors import ErrorCode, OperationError

MAX_OUTPUT_BYTES = 1 << 20
_CHUNK = 65536


@dataclass(frozen=True, slots=True)
class Finished:
    """What a program left behind."""

    argv: tuple[str, ...]
    status: int  # negative: the signal that ended it
    stdout: bytes
    stderr: bytes

    @property
    def last_words(self) -> str:
        """The last line it wrote to stderr, or to stdout, or its exit status."""
        for stream in (self.stderr, self.stdout):
            lines = [line for line in stream.decode(errors="replace").splitlines() if line.strip()]
            if lines:
                return lines[-1].strip()
        return f"exit status {self.status}"


def run(
    argv: Sequence[str],
    timeout_s: float,
    *,
    stdin: bytes = b"",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    max_output_bytes: int = MAX_OUTPUT_BYTES,
) -> Finished:
    """Run a program to its end, whatever its exit status.

    `env` is added to this process's environment. Raises `tool-missing` when it is not installed, `step-timeout` at the
    deadline, and `internal` when it wrote more than `max_output_bytes` to one stream.
    """
    return Started(argv, cwd=cwd, env=env).finish(timeout_s, stdin=stdin, max_output_bytes=max_output_bytes)


class Started:
    """A program that waits for its input: started ahead of the moment in which its start would cost time."""

    def __init__(self, argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        self._argv = tuple(argv)
        self._process = _start(argv, cwd=cwd, env=env)

    @property
    def is_waiting(self) -> bool:
        """It has not ended by itself."""
        return self._process.poll() is None

    def finish(self, timeout_s: float, *, stdin: bytes = b"", max_output_bytes: int = MAX_OUTPUT_BYTES) -> Finished:
        """Give it its input and wait for its end. Raises as `run` does."""
        name, deadline = self._argv[0], time.monotonic() + timeout_s
        try:
            stdout, stderr = _exchange(self._process, name, stdin, deadline, max_output_bytes)
        except _OutOfTimeError as cause:
            raise OperationError(
                ErrorCode.STEP_TIMEOUT,
                f"cannot run {name}: not done after {timeout_s:g} s",
                facts={"argv": list(self._argv)},
            ) from cause
        finally:
            self.end()
        return Finished(self._argv, self._process.returncode, stdout, stderr)

    def end(self) -> None:
        """It is gone, whether or not it was asked."""
        _end(self._process)


def run_checked(
    argv: Sequence[str],
    timeout_s: float,
    *,
    failure: ErrorCode,
    stdin: bytes = b"",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    max_output_bytes: int = MAX_OUTPUT_BYTES,
) -> Finished:
    """Like `run`; another exit status than 0 raises `failure` with the program's last line."""
    return checked(run(argv, timeout_s, stdin=stdin, cwd=cwd, env=env, max_output_bytes=max_output_bytes), failure)


def checked(finished: Finished, failure: ErrorCode) -> Finished:
    """The same. Raises `failure` with the program's last line where its exit status is not 0."""
    if finished.status != 0:
        raise OperationError(
            failure,
            f"cannot run {finished.argv[0]}: {finished.last_words}",
            facts={"argv": list(finished.argv), "status": finished.status},
        )
    return finished


def pass_through(argv: Sequence[str], hear: Callable[[bytes], None] | None = None) -> int:
    """Run a program on the caller's own terminal and give its exit status; no deadline, a person is waiting.

    `hear` gets each line of its standard error, which is passed on all the same.
    """
    try:
        if hear is None:
            return subprocess.run(list(argv), check=False).returncode
        with subprocess.Popen(list(argv), stderr=subprocess.PIPE) as process:
            assert process.stderr  # noqa: S101 - it is a pipe
            for line in process.stderr:
                sys.stderr.write(line.decode(errors="replace"))
                sys.stderr.flush()
                hear(line)
            return process.wait()
    except FileNotFoundError as cause:
        raise _missing(argv[0]) from cause


class _OutOfTimeError(Exception):
    pass


def _missing(name: str) -> OperationError:
    return OperationError(ErrorCode.TOOL_MISSING, f"cannot run {name}: it is not installed", f"Install {name}.")


def _start(argv: Sequence[str], *, cwd: Path | None, env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env={**os.environ, **env} if env else None,
            start_new_session=True,
        )
    except FileNotFoundError as cause:
        raise _missing(argv[0]) from cause
    except PermissionError as cause:
        raise OperationError(ErrorCode.NOT_PERMITTED, f"cannot run {argv[0]}: {cause.strerror}") from cause


def _exchange(
    process: subprocess.Popen[bytes], name: str, stdin: bytes, deadline: float, limit: int
) -> tuple[bytes, bytes]:
    assert process.stdin and process.stdout and process.stderr  # noqa: S101 - all three are pipes
    collected = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    out, err = collected.values()
    pending = memoryview(stdin)
    with selectors.DefaultSelector() as selector:
        for descriptor in collected:
            selector.register(descriptor, selectors.EVENT_READ)
        if pending:
            selector.register(process.stdin, selectors.EVENT_WRITE)
        else:
            process.stdin.close()
        while selector.get_map():
            ready = selector.select(_left(deadline))
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    pending = _feed(process.stdin, pending)
                    if not pending:
                        selector.unregister(process.stdin)
                        process.stdin.close()
                    continue
                chunk = os.read(key.fd, _CHUNK)
                if not chunk:
                    selector.unregister(key.fd)
                    continue
                collected[key.fd] += chunk
                if len(collected[key.fd]) > limit:
                    raise OperationError(ErrorCode.INTERNAL, f"cannot run {name}: it wrote more than {limit} bytes")
    try:
        process.wait(_left(deadline))
    except subprocess.TimeoutExpired as cause:
        raise _OutOfTimeError from cause
    return bytes(out), bytes(err)


def _feed(stream: IO[bytes], pending: memoryview) -> memoryview:
    try:
        # A pipe that is ready takes at least PIPE_BUF bytes without blocking.
        return pending[os.write(stream.fileno(), pending[:4096]) :]
    except BrokenPipeError:  # it read as much as it wanted
        return memoryview(b"")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise _OutOfTimeError
    return left


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream and not stream.closed:
            stream.close()

"""A port of the board, brought to 127.0.0.1 of the host, so that a browser there can open the board's pages.

`ssh -L` runs in the workstation's network namespace, where a browser of the host cannot go. A Unix socket can be
reached from every namespace, so ssh forwards to one, and a small relay in this process joins it to a port of the
host.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tests.device.process import BoardError, holds_within

CHUNK_BYTES = 65536
Result = TypeVar("Result")


class Forward:
    """An open way from `127.0.0.1:port` on the host to a port of the board, until it is closed."""

    def __init__(self, ssh: list[str], board_port: int, *, host_port: int = 0, timeout_s: float = 15) -> None:
        # A path of its own: the name of a Unix socket has room for 107 bytes, and a work tree may lie deep.
        self._folder = Path(tempfile.mkdtemp(prefix="avocado-forward-"))
        self._socket = self._folder / "socket"
        *program, target = ssh
        way = f"{self._socket}:127.0.0.1:{board_port}"
        self._ssh = subprocess.Popen(
            [*program, "-N", "-T", "-o", "ExitOnForwardFailure=yes", "-L", way, target],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="forward", daemon=True)
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._thread.start()
        try:
            holds_within(lambda: self._socket.exists() or self._ssh.poll() is not None, timeout_s)
            if not self._socket.exists():
                raise BoardError(f"cannot forward port {board_port} of the board: ssh did not open the way")
            self._server = self._call(asyncio.start_server(self._serve, "127.0.0.1", host_port))
        except BaseException:
            self._end()
            raise
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        """The address for a browser on the host."""
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        """End every connection and give the port back; fine when it is closed."""
        if not self._loop.is_closed():
            self._call(self._stop_serving())
            self._end()

    def __enter__(self) -> Forward:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        here = asyncio.current_task()
        assert here is not None
        self._connections[here] = [writer]
        try:
            board_reader, board_writer = await asyncio.open_unix_connection(self._socket)
            self._connections[here].append(board_writer)
            try:
                async with asyncio.TaskGroup() as both_ways:
                    both_ways.create_task(_pump(reader, board_writer))
                    both_ways.create_task(_pump(board_reader, writer))
            finally:
                board_writer.close()
        except* OSError:
            pass  # one side left; the other learns it from the end of its own connection
        finally:
            del self._connections[here]
            writer.close()

    async def _stop_serving(self) -> None:
        self._server.close()
        for writers in self._connections.values():
            for writer in writers:
                # Not the task: asyncio reports a cancelled connection handler as an error before Python 3.12.
                writer.transport.abort()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=10)

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._ssh.terminate()
        try:
            self._ssh.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._ssh.kill()
            self._ssh.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
    writer.write_eof()

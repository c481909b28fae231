"""A folder, served over one socket that is connected already: GET and HEAD, ranges, keep-alive.

The other end has this one connection and no second, so no request may end it: a handler answers whatever is asked and
never raises. Nothing outside of the folder is reachable.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

_KEEP_ALIVE_S = 3600.0
_CHUNK_BYTES = 1 << 20


@asynccontextmanager
async def serving(folder: Path, sock: socket.socket) -> AsyncIterator[None]:
    """Serve the folder on the socket until the block ends."""
    root = folder.resolve()

    async def answer(request: web.Request) -> web.StreamResponse:
        path = _file(root, request.path)
        if path is None:
            return web.Response(status=404, text="not found\n")
        return web.FileResponse(path, chunk_size=_CHUNK_BYTES)

    app = web.Application()
    app.router.add_get("/{name:.*}", answer)
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=_KEEP_ALIVE_S, shutdown_timeout=1.0)
    await runner.setup()
    try:
        assert runner.server is not None  # noqa: S101 - set up above
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(runner.server, sock=sock)
        try:
            yield
        finally:
            transport.close()
    finally:
        await runner.cleanup()


def _file(root: Path, request_path: str) -> Path | None:
    try:
        path = (root / request_path.lstrip("/")).resolve()
        return path if path.is_relative_to(root) and path.is_file() else None
    except (OSError, ValueError):  # a name too long, or with a NUL
        return None

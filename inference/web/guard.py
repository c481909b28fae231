"""Who may talk to the page: a check of the Host header, an optional token, and headers that keep other sites out.

On loopback without a token, a web site that the user happens to have open could reach the page by rebinding its own
name to 127.0.0.1; such a request carries that name as its Host and is refused. Port numbers are not compared, because
people forward the page to whatever port is free. With a token the cookie is bound to the host it was given for, which
rebinding cannot borrow, so any Host is taken.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Middleware

from inference.config import ConfigError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

COOKIE = "pose_token"
_LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}
_SHORTEST_TOKEN = 16
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; img-src 'self' data:; style-src 'self'; script-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def read_token(path: Path) -> str:
    """The token in a file, without the line's end; ConfigError when it cannot be read or is too short to be one."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the page's token {path}: {error}", f"write a token to {path}") from error
    if len(token) < _SHORTEST_TOKEN or not token.isascii():
        raise ConfigError(
            f"cannot use the page's token {path}: fewer than {_SHORTEST_TOKEN} ASCII characters",
            f"openssl rand -hex 16 > {path}",
        )
    return token


def guard(token: str | None) -> Middleware:
    """The middleware, with or without a token."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token is None:
            if _host_name(request) not in _LOOPBACK_NAMES:
                raise web.HTTPMisdirectedRequest(text="open this page as http://localhost:PORT/\n")
        elif (offered := request.query.get("token")) is not None:
            return _take_token(request, token, offered)
        elif not _knows(request, token):
            raise web.HTTPUnauthorized(text="open this page with ?token=TOKEN, or send it as a Bearer token\n")
        return await handler(request)

    return check


async def add_headers(_request: web.Request, response: web.StreamResponse) -> None:
    """Before any answer leaves, streams and errors included."""
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)


def _host_name(request: web.Request) -> str:
    try:
        return urlsplit(f"//{request.host}").hostname or ""
    except ValueError:
        return ""


def _knows(request: web.Request, token: str) -> bool:
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return _same(bearer, token) or _same(request.cookies.get(COOKIE, ""), token)


def _take_token(request: web.Request, token: str, offered: str) -> web.Response:
    """Move a token out of the address, where it would stay in the history, into a cookie."""
    if not _same(offered, token):
        raise web.HTTPUnauthorized(text="this token is wrong\n")
    response = web.Response(status=303, headers={"Location": request.path})
    response.set_cookie(COOKIE, token, httponly=True, samesite="Strict", secure=request.secure)
    return response


def _same(offered: str, token: str) -> bool:
    return hmac.compare_digest(offered.encode(), token.encode())

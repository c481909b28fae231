"""A static HTTP server that tells the truth until a rule says otherwise; on loopback, unless an address is given."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

Rule = Callable[["Handler", bytes], None]


@dataclass
class Server:
    """`rules`: what to do instead of answering, for paths that contain the key. `asked`: every path and Range."""

    root: Path
    url: str = ""
    rules: dict[str, Rule] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server_state: Server

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        headers.setdefault("Content_Length", str(len(body)))
        for name, value in headers.items():
            if value:
                self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def hang_up(self) -> None:
        self.close_connection = True

    def do_GET(self) -> None:
        state = self.server_state
        asked_range = self.headers.get("Range")
        state.asked.append((self.path, asked_range))
        path = state.root / self.path.lstrip("/")
        if not path.is_file():
            self.reply(b"not here", 404)
            return
        body = path.read_bytes()
        for part, rule in list(state.rules.items()):
            if part in self.path:
                rule(self, body)
                return
        self.honest(body)

    def honest(self, body: bytes) -> None:
        asked_range = self.headers.get("Range")
        if asked_range:
            start = int(asked_range.removeprefix("bytes=").removesuffix("-"))
            self.reply(body[start:], 206, Content_Range=f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.reply(body)


class _Quiet(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """The client hangs up on lies; that is the point."""


@contextlib.contextmanager
def serving(root: Path, address: str = "127.0.0.1", port: int = 0) -> Iterator[Server]:
    state = Server(root)
    handler = type("Bound", (Handler,), {"server_state": state})
    server = _Quiet((address, port), handler)
    state.url = f"http://{address}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        state.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(10)

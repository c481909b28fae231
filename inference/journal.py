"""Log records as journal entries with fields, or as plain lines where there is no journal.

An event that an operator may search for has a stable MESSAGE_ID (docs/events.md) and fields beside its text. They go
straight to journald's socket, because boards without python3-systemd run this service too. JOURNAL_STREAM says whether
standard error is the journal; a record that journald does not take is written there instead, never lost silently.
Follows systemd's Native Journal Protocol.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys

from inference.errors import InferenceError

SOCKET = "/run/systemd/journal/socket"

SERVICE_STARTED = "cbdcf0ef0c6a49fda3d823e9a3b072b8"
SERVICE_STOPPED = "639517122b1747d49e34ea95ff776839"
BACKEND_CHANGED = "287408850956408aa770a9a4c85d569a"
CAMERA_FOUND = "1e9836410bf44193bdfa99afaeff73af"
CAMERA_LOST = "8503fd40c63243b2a560e6a5435508a4"
FRAME_UNANSWERED = "f23bc688130e4985b5e818e64133e3b9"
FAULT_INJECTED = "330a330739e5457a8219cb30b29a2fa0"
HEARTBEAT_STALE = "314624d9a3414df7849bb2229ae5719c"


def event(message_id: str, **fields: str) -> dict[str, str]:
    """The `extra=` of a logging call that is an event: its id, and fields in journal spelling such as BACKEND."""
    return {"MESSAGE_ID": message_id, **fields}


def in_one_line(error: InferenceError) -> str:
    """The message and the remedy as the journal shows them."""
    return f"{error.message} (try: {error.remedy})" if error.remedy else error.message


def set_up_logging(verbose: bool = False) -> None:
    """Send everything that is logged to the journal, or to standard error when that is a terminal or a pipe."""
    root = logging.getLogger()
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    root.handlers = [JournalHandler(SOCKET) if stderr_is_journal() else _plain_handler()]
    # One line a request is what a browser that polls every second would leave.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)


def stderr_is_journal() -> bool:
    """Whether systemd connected standard error to the journal, and it still is."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    status = os.fstat(sys.stderr.fileno())
    return (device, inode) == (str(status.st_dev), str(status.st_ino))


def _plain_handler() -> logging.Handler:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    return handler


class JournalHandler(logging.Handler):
    """One datagram a record."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)

    def emit(self, record: logging.LogRecord) -> None:
        """Send the record; journald that is gone or does not keep up gets it as a line on standard error."""
        text = self.format(record)
        fields = {
            "MESSAGE": text,
            "PRIORITY": str(_priority(record.levelno)),
            "SYSLOG_IDENTIFIER": "avocado-infer",
            "LOGGER": record.name,
            # What a call gave as `extra=` in the journal's spelling.
            **{key: str(value) for key, value in vars(record).items() if key.isupper()},
        }
        try:
            self._socket.sendto(b"".join(_encode(key, value) for key, value in fields.items()), self._path)
        except OSError:
            sys.stderr.write(f"<{_priority(record.levelno)}>{text}\n")

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()
        super().close()


def _priority(level: int) -> int:
    for least, priority in ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6)):
        if level >= least:
            return priority
    return 7


def _encode(key: str, value: str) -> bytes:
    data = value.encode(errors="replace")
    if b"\n" not in data:
        return key.encode() + b"=" + data + b"\n"
    return key.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n"

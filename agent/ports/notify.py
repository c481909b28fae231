"""What the daemon tells systemd: readiness and status by sd_notify, log records to the journal with their fields.

Both are one datagram to a socket, written here instead of taken from python3-systemd, which a board may not have.
Formats: sd_notify(3) and https://systemd.io/JOURNAL_NATIVE_PROTOCOL/.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import sys

JOURNAL_SOCKET = "/run/systemd/journal/socket"
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_MAX_DATAGRAM = 64 * 1024


def notify(**fields: str) -> None:
    """Tell systemd, for example `notify(READY="1", STATUS="...")`; nothing happens when it did not ask."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    message = "\n".join(f"{name}={value}" for name, value in fields.items()).encode()
    link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    # A notification that is lost costs a timeout of systemd's; it must not cost the agent.
    with link, contextlib.suppress(OSError):
        link.sendto(message, address)


def watchdog_interval_s() -> float | None:
    """How often systemd wants a sign of life, or None when it does not."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    return int(microseconds) / 1_000_000 if microseconds.isdigit() and int(microseconds) else None


class JournalHandler(logging.Handler):
    """A logging handler whose records keep their upper-case attributes (`extra=`) as journal fields."""

    def __init__(self, identifier: str) -> None:
        super().__init__()
        self._identifier = identifier
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record; one that is too large for a datagram loses its tail."""
        fields = {
            "MESSAGE": self.format(record),
            "PRIORITY": str(next((p for level, p in _PRIORITIES if record.levelno >= level), 7)),
            "SYSLOG_IDENTIFIER": self._identifier,
            "LOGGER": record.name,
        }
        fields |= {key: str(value) for key, value in record.__dict__.items() if key.isupper()}
        data = b"".join(_field(name, value) for name, value in fields.items())
        try:
            self._socket.sendto(data, JOURNAL_SOCKET)
        except OSError:
            self.handleError(record)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        super().close()


def _field(name: str, value: str) -> bytes:
    data = value.encode(errors="replace")[: _MAX_DATAGRAM // 2]
    if b"\n" not in data:
        return name.encode() + b"=" + data + b"\n"
    return name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n"


def log_to_journal(identifier: str, *, verbose: bool = False) -> None:
    """Send all log records to the journal where there is one, else to stderr."""
    root = logging.getLogger()
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    if os.path.exists(JOURNAL_SOCKET) and os.environ.get("JOURNAL_STREAM"):  # noqa: PTH110
        handler: logging.Handler = JournalHandler(identifier)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    root.addHandler(handler)

"""systemd's notification protocol in a few lines of socket code: readiness, status text and the watchdog.

Written here because the pose service runs on boards without python3-systemd. Does nothing where NOTIFY_SOCKET is unset,
so that the service can be run by hand. Follows sd_notify(3).
"""

from __future__ import annotations

import os
import socket


class Notifier:
    """Sends to the manager that started this process, if one did."""

    def __init__(self) -> None:
        address = os.environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        usec = os.environ.get("WATCHDOG_USEC", "")
        ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(usec) / 1e6 if usec.isdigit() and ours else None

    def send(self, **fields: str | int) -> None:
        """Send assignments such as READY=1 or STATUS="..."; a manager that is gone is no reason to fail."""
        if not self._address:
            return
        message = "\n".join(f"{key}={str(value).replace(chr(10), ' ')}" for key, value in fields.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            try:
                sender.sendto(message.encode(), self._address)
            except (BlockingIOError, ConnectionRefusedError, FileNotFoundError):
                return

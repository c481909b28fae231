"""How a deploy's two ends speak over one ssh connection's standard streams.

Standard output and input of `avocadoctl receive` carry nothing but one HTTP/1.1 connection, after a marker that a login
shell's chatter can be told from. Standard error carries, between lines for people, events: a line that begins with
`\\0avocado-event ` and continues with one JSON object. The last event is the result; the host goes by it and not by the
exit status, which some servers lose.
"""

from __future__ import annotations

import json
from typing import Any

MARKER = b"\0avocado-receive 1\n"
EVENT_PREFIX = b"\0avocado-event "
MAX_NOISE_BYTES = 64 * 1024
MAX_EVENT_BYTES = 4 << 20


def event_line(event: dict[str, Any]) -> bytes:
    """One event as the board writes it."""
    return EVENT_PREFIX + json.dumps(event, separators=(",", ":")).encode() + b"\n"


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The event of a line, or None for a line that is meant for people."""
    if not line.startswith(EVENT_PREFIX):
        return None
    try:
        event = json.loads(line[len(EVENT_PREFIX) :])
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None

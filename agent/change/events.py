"""Message ids of the events an operator may search the journal for; docs/events.md explains each.

`journalctl MESSAGE_ID=<id>` finds them. An id is never reused for another meaning.
"""

from __future__ import annotations

import logging
from typing import Any

CHANGE_BEGUN = "a4b1f27db05f456380db084d29f53d42"
CHANGE_APPLIED = "3b1cdb90f1b54366a0afe625cb21a588"
CHANGE_REVERTED = "188d7cfbff5c4c27a5b7c22dec4d52c3"
CHANGE_STUCK = "b569b5287e0047a18e5b70509eada0ca"
CHANGE_RECOVERED = "261c013abc624e95a3a76dbfccb5a886"
STEP_FAILED = "b5dd85b6d8654d58945c561173e3feed"
STEP_WARNING = "646250f06dd64bce8cbf4d28f2534581"
OVERLAY_CHOSEN = "20bbaf2de01d401b8cd1d4280d2711e6"
AGENT_READY = "c7d1f2a0b5cf4bb0a3e86f3b6b1c9d52"

_LOG = logging.getLogger("avocado.change")


def event(message_id: str, level: int, text: str, **fields: Any) -> None:
    """One line in the journal with its id and fields such as CHANGE_ID and STEP."""
    _LOG.log(level, "%s", text, extra={"MESSAGE_ID": message_id, **{k: str(v) for k, v in fields.items()}})

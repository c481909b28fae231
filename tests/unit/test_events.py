"""docs/events.md explains exactly the message ids that the agent writes."""

from __future__ import annotations

import re
from pathlib import Path

from agent.change import events

PAGE = Path(__file__).parents[2] / "docs" / "events.md"


def test_every_message_id_is_explained_once_and_no_other() -> None:
    written = [
        value for name, value in vars(events).items() if name.isupper() and re.fullmatch(r"[0-9a-f]{32}", str(value))
    ]
    explained = re.findall(r"^\| `([0-9a-f]{32})` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(written) == sorted(explained)
    assert len(set(written)) == len(written) >= 7

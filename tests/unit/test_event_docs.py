"""docs/events.md explains every event that can be searched for, and every reason of a switch."""

from pathlib import Path

import pytest

from agent.change import events
from inference import journal
from inference.policy import Reason

TEXT = (Path(__file__).parents[2] / "docs/events.md").read_text()


@pytest.mark.parametrize("module", [journal, events])
def test_every_event_is_explained_once(module: object) -> None:
    ids = [value for name, value in vars(module).items() if name.isupper() and len(str(value)) == 32]
    assert ids
    assert {identifier: TEXT.count(f"`{identifier}`") for identifier in ids} == dict.fromkeys(ids, 1)


def test_every_reason_of_a_switch_is_explained() -> None:
    for reason in Reason:
        assert f"| `{reason}` |" in TEXT or reason is Reason.NO_NPU

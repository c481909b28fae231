"""A change that is stuck is a problem of the board, and stays one until another change has ended well."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.change.record import ChangeRecord, Outcome, Reason
from agent.contract.errors import ErrorCode
from agent.problems import change_problems

REASON = Reason(ErrorCode.CHANGE_STUCK, "cannot reload systemd: no room", "Free space on /run.")
RECORD = ChangeRecord(12, "deploy", "boot", "root", None, None, (), "2026-12-01T10:00:00Z", reason=REASON)


def test_a_stuck_change_is_named_with_what_to_do() -> None:
    assert change_problems(replace(RECORD, outcome=Outcome.STUCK)) == [
        {
            "code": "change-stuck",
            "message": "change 12 (deploy) is stuck: cannot reload systemd: no room",
            "remedy": "Free space on /run.",
        }
    ]


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome is not Outcome.STUCK])
def test_any_other_end_is_no_problem(outcome: Outcome) -> None:
    assert change_problems(replace(RECORD, outcome=outcome)) == []
    assert change_problems(None) == []

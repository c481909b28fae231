"""How a change may end, in the words of its record: cut short by what, what to do when stuck, its closing event."""

from __future__ import annotations

import logging

from agent.change import events
from agent.change.record import ChangeRecord, Outcome
from agent.contract.errors import ErrorCode, OperationError

CLOSING = {
    Outcome.APPLIED: (events.CHANGE_APPLIED, logging.INFO),
    Outcome.REVERTED: (events.CHANGE_REVERTED, logging.WARNING),
    Outcome.CANCELLED: (events.CHANGE_REVERTED, logging.INFO),
    Outcome.STUCK: (events.CHANGE_STUCK, logging.ERROR),
}
UNDONE_BY_REBOOT = "this agent does not know the step; the reboot has undone it"


def interruption(record: ChangeRecord, boot_id: str) -> OperationError:
    """Why a change that the agent's start finds before its commit did not go on. `boot_id`: of the boot now."""
    if record.boot_id != boot_id:
        return OperationError(
            ErrorCode.POWER_LOST,
            f"cannot finish change {record.number}: the board restarted, or lost its power, before activation",
            "Ask for the change again.",
        )
    return OperationError(
        ErrorCode.CHANGE_REVERTED,
        f"cannot finish change {record.number}: the agent was restarted before activation",
        "Ask for the change again.",
    )


def remedy_of_stuck(record: ChangeRecord, first: str = "") -> str:
    """What to do with a board that the change could neither finish nor put back; `first`: about what kept it there."""
    see = first.rstrip(".") or f"Run 'avocadoctl history show {record.number}', and repair what it names"
    return f"{see}. Then run 'avocadoctl refresh', or reboot: the board starts with the active runtime."

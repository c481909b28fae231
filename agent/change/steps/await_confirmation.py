"""await_confirmation: whoever asked for a change of /etc has come back over a new connection, or the change reverts.

A bad /etc can lock everybody out of a board that is otherwise healthy: no address, no user, no sshd. A deploy over ssh
is confirmed by its host (Manager.Confirm over a new ssh connection); one from a server by reaching that server anew.
Whoever sees that nobody will come may cancel instead of waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agent.change.confirmation import Confirmation
from agent.change.step import Inputs, Memo, Report
from agent.contract.errors import ErrorCode, OperationError
from agent.ports.protocols import Clock

POLL_S = 0.2
REACH_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class AwaitConfirmation:
    """Inputs: `within_s`, and `server`, the address to reach anew (None: the host has to come back)."""

    confirmation: Confirmation
    reach: Callable[[str], bool]
    clock: Clock

    kind = "await_confirmation"
    commits = False
    volatile = True
    cancellable = True

    def prepare(self, inputs: Inputs) -> Memo:
        """From here on a word counts: the record that says so is read by whoever will give it."""
        self.confirmation.withdraw()
        return {}

    def do(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """Somebody came back. Raises `not-confirmed`, or `change-cancelled`."""
        began_s = self.clock.monotonic()
        reached_s = began_s - REACH_EVERY_S
        while not self.confirmation.given():
            now_s = self.clock.monotonic()
            if inputs["server"] is not None and now_s - reached_s >= REACH_EVERY_S:
                reached_s = now_s
                if self.reach(inputs["server"]):
                    return
            if now_s - began_s >= inputs["within_s"]:
                raise _not_confirmed(inputs)
            self.clock.sleep(POLL_S)
            report.stop_if_cancelled()

    def undo(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """Waiting changes nothing."""


def _not_confirmed(inputs: Inputs) -> OperationError:
    who = "the host did not come back" if inputs["server"] is None else f"{inputs['server']} could not be reached"
    return OperationError(
        ErrorCode.NOT_CONFIRMED,
        f"cannot keep the new /etc: {who} over a new connection within {inputs['within_s']:g} s",
        "Look for what in the configuration extension cuts the board off, then deploy again.",
    )

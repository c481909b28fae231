"""activate: the commit. `previous` is set, `active` renamed and the folder synced: the next boot merges the new set.

Only a passed confirm_health leads here. Whether it happened is what the link says, not what the journal says.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.change.step import Inputs, Memo, Report
from agent.ports.protocols import Overlay, Runtimes

SETTLE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Activate:
    """Inputs: `to`, and `from` (the active runtime before, or None)."""

    runtimes: Runtimes
    overlay: Overlay

    kind = "activate"
    commits = True
    volatile = False
    cancellable = False

    def prepare(self, inputs: Inputs) -> Memo:
        """Both links as they are."""
        return {"active": self.runtimes.active(), "previous": self.runtimes.previous()}

    def do(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """`active` names the new runtime, and the trial's scaffolding is gone."""
        self.runtimes.activate(inputs["to"], inputs["from"])
        self.overlay.settle(SETTLE_TIMEOUT_S)

    def undo(self, inputs: Inputs, memo: Memo) -> None:
        """Both links are as they were. Runs only when `active` was not renamed; `previous` may have been."""
        if memo["active"] is not None:
            self.runtimes.activate(memo["active"], memo["previous"])

    def happened(self, inputs: Inputs) -> bool:
        """The boot set is the new one."""
        wanted: str = inputs["to"]
        return self.runtimes.active() == wanted

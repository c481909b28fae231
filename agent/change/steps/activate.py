"""activate: the commit. `previous` is set, `active` renamed and the folder synced: the next boot merges the new set.

Only a passed confirm_health leads here, and only while the set that passed is still the merged one: systemd's own tools
merge what `active` names, and anybody may run them during the trial. Whether it happened is what the link says, not
what the journal says.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.change.step import Inputs, Memo, Report
from agent.contract.errors import ErrorCode, OperationError
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
        """Both links as they are. Raises `switch-failed` where another set is merged than the one that was proven."""
        manifest = self.runtimes.manifest(inputs["to"])
        if not self.overlay.merged().is_exactly(manifest):
            raise OperationError(
                ErrorCode.SWITCH_FAILED,
                f"cannot activate runtime {manifest.runtime.name} {manifest.runtime.version}:"
                " the merged set was changed during the trial",
                "Ask for the change again, and run neither systemd-sysext nor systemd-confext meanwhile.",
            )
        return {"active": self.runtimes.active(), "previous": self.runtimes.previous()}

    def do(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """`active` names the new runtime, and the trial's scaffolding is gone."""
        self.runtimes.activate(inputs["to"], inputs["from"])
        self.overlay.settle(SETTLE_TIMEOUT_S)

    def undo(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """Both links are as they were. Runs only when `active` was not renamed; `previous` may have been."""
        if memo["active"] is not None:
            self.runtimes.activate(memo["active"], memo["previous"])

    def happened(self, inputs: Inputs) -> bool:
        """The boot set is the new one."""
        wanted: str = inputs["to"]
        return self.runtimes.active() == wanted

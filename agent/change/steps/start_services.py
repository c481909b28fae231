"""start_services: the owned services are active, but for those that somebody had stopped before.

A unit that the new set owns and the old one did not is new here, so it starts: that is how a first deploy comes up.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.change.step import Inputs, Memo, Report
from agent.change.steps.releases import AffectedUnits
from agent.change.steps.stop_services import START_TIMEOUT_S, STOP_TIMEOUT_S
from agent.ports.protocols import Units


@dataclass(frozen=True, slots=True)
class StartServices:
    """Inputs: `units` of the images that left, `images` that came, `stay_stopped`."""

    units: Units
    affected: AffectedUnits

    kind = "start_services"
    commits = False
    volatile = True
    cancellable = False

    def prepare(self, inputs: Inputs) -> Memo:
        """Which units there are to start, now that the new unit files are read."""
        return {"units": self.affected.to_start(inputs)}

    def do(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """They are active."""
        for name in memo["units"]:
            self.units.start(name, START_TIMEOUT_S)

    def undo(self, inputs: Inputs, memo: Memo) -> None:
        """They are stopped."""
        for name in reversed(memo["units"]):
            self.units.stop(name, STOP_TIMEOUT_S)

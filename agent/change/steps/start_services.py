"""start_services: the owned services are active, but for those that somebody had stopped or masked.

A unit that the new set owns and the old one did not is new here, so it starts: that is how a first deploy comes up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from agent.change.step import Inputs, Memo, Report
from agent.change.steps.releases import AffectedUnits
from agent.change.steps.stop_services import START_TIMEOUT_S, STOP_TIMEOUT_S, all_of, sparing
from agent.contract.errors import ErrorCode, OperationError
from agent.ports.protocols import Units


@dataclass(frozen=True, slots=True)
class StartServices:
    """Inputs: `units` of the images that left, the `bystanders` among them, `images` that came, `partial`."""

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
            try:
                self.units.start(name, START_TIMEOUT_S)
            except OperationError as cause:
                error = self._explained(name, cause)
                if name not in inputs.get("bystanders", ()):
                    raise error from cause
                report.warn(error.message)

    def _explained(self, name: str, error: OperationError) -> OperationError:
        """A job says only that it failed; the unit knows whether that was a timeout, a signal or an exit status."""
        result = self.units.states([name])[name].result
        if error.code is not ErrorCode.UNIT_FAILED or not result or result in error.message or result == "success":
            return error
        return OperationError(error.code, f"{error.message} ({result})", error.remedy, error.facts)

    def undo(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """They are stopped."""
        stops = {name: partial(self.units.stop, name, STOP_TIMEOUT_S) for name in reversed(memo["units"])}
        all_of(sparing(inputs, stops, report))

"""warm_up: the model of the new set was tried before anything is stopped for it, and its NPU's compile is in the cache.

Optional. The set is shown to one process of its own, so the old model goes on serving. A model that fails there is
refused as confirm_health would refuse it, only without the service having been away. Where nothing can be learnt (an
NPU with a single context, a board that cannot show a set privately) the change goes on with a warning.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.change.step import Inputs, Memo, Report
from agent.change.steps.releases import AffectedUnits
from agent.contract.errors import ErrorCode, OperationError
from agent.plan import INFERENCE_UNIT
from agent.ports.protocols import Clock, Rehearsal, Runtimes, Tried, Verdict

TRY_TIMEOUT_S = 600.0  # an NPU may compile for minutes, and does so beside the model that serves
POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Inputs: `to`, the `units` of the images that leave, `images` that come, the NPU's `nodes` and `contexts`, and the
    `backend` that serves.

    Fact: warm_up, with the backend that ran the golden frame, its oks and first_invoke_ms.
    """

    rehearsal: Rehearsal
    runtimes: Runtimes
    affected: AffectedUnits
    clock: Clock

    kind = "warm_up"
    commits = False
    volatile = True
    cancellable = True

    def prepare(self, inputs: Inputs) -> Memo:
        """Whether the images concern the pose service at all: those that came can be read only now."""
        return {"concerned": INFERENCE_UNIT in self.affected.to_stop(inputs)}

    def do(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """The model passed its golden frame, or a warning says why nobody knows. Raises `unhealthy`."""
        if not memo["concerned"]:
            return
        spared = _spared(inputs)
        if spared:
            report.warn(f"not tried on the NPU: {spared}")
        tried = self._try(inputs, report, only_cpu=bool(spared))
        if tried.is_busy and not spared:
            report.warn(f"not tried on the NPU: {tried.why}")
            tried = self._try(inputs, report, only_cpu=True)
        match tried.verdict:
            case Verdict.PASSED:
                found = {"backend": tried.backend, "oks": tried.oks, "first_invoke_ms": tried.first_invoke_ms}
                report.fact("warm_up", found)
            case Verdict.UNKNOWN:
                report.warn(f"not tried: {tried.why}")
            case Verdict.FAILED:
                raise _refused(tried.model, tried.why, tried.remedy)

    def _try(self, inputs: Inputs, report: Report, *, only_cpu: bool) -> Tried:
        deadline = self.clock.monotonic() + TRY_TIMEOUT_S
        try:
            self.rehearsal.begin(self.runtimes.folder(inputs["to"]), TRY_TIMEOUT_S, only_cpu=only_cpu)
        except OperationError as error:
            # It says nothing about the new set, and nobody has to do without a model because of an extra.
            return Tried(Verdict.UNKNOWN, why=error.message)
        while (tried := self.rehearsal.result()) is None:
            if self.clock.monotonic() >= deadline:
                raise _refused("", f"it gave no answer within {TRY_TIMEOUT_S:g} s", "")
            self.clock.sleep(POLL_S)
            report.stop_if_cancelled()
        return tried

    def undo(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """Nobody tries it any more. A process that hangs in the kernel holds nothing that the old set needs."""
        try:
            self.rehearsal.end()
        except OperationError as error:
            report.warn(error.message)


def _spared(inputs: Inputs) -> str:
    """Why the NPU is left alone, or an empty string."""
    if inputs["nodes"] and inputs["contexts"] < 2:
        return "it grants one context"
    if inputs["nodes"] and inputs["backend"] != "npu":
        # It may be the NPU that fails and not the model: the way back from there must stay open.
        return "the model that serves does not run on it either"
    return ""


def _refused(model: str, why: str, remedy: str) -> OperationError:
    return OperationError(
        ErrorCode.UNHEALTHY,
        f"cannot warm up {f'model {model}' if model else 'the new model'}: {why}",
        remedy or "See what it said: journalctl -b -n 50 -u avocado-warm-up",
    )

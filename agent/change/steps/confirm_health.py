"""confirm_health: the proof is in. Takes samples until agent/health.py has decided; its reason is the step's error.

Then the agent that the set brings is asked whether it would start. One that is too old for the question is no broken
one, or no board could go back to it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from agent.change.step import Inputs, Memo, Report
from agent.change.steps.absence import Absence
from agent.change.steps.releases import AffectedUnits
from agent.contract.errors import ErrorCode, OperationError
from agent.health import Health, HealthPolicy, Sample, SelfTest, answering, judge, wants_self_test
from agent.plan import AGENT_UNIT, INFERENCE_UNIT
from agent.ports.protocols import Clock, Inference, InferenceState, Units

POLL_S = 0.2
ASK_TIMEOUT_S = 5.0
SELF_TEST_TIMEOUT_S = 30.0
AGENT_CHECK = ("/usr/bin/avocadod", "--check")
AGENT_TIMEOUT_S = 60.0
_USAGE = 2  # argparse's exit status for an option that it does not know

_LOG = logging.getLogger("avocado.change")


@dataclass(frozen=True, slots=True)
class ConfirmHealth:
    """Inputs as start_services, and whether the set `brings_agent`. Facts: away_s, backend, model."""

    units: Units
    affected: AffectedUnits
    inference: Inference
    clock: Clock
    absence: Absence
    policy: HealthPolicy = field(default_factory=HealthPolicy)

    kind = "confirm_health"
    commits = False
    volatile = True
    cancellable = False

    def prepare(self, inputs: Inputs) -> Memo:
        """Which units have to prove themselves: bystanders are no part of the set."""
        others = inputs.get("bystanders", ())
        return {"units": [unit for unit in self.affected.to_start(inputs) if unit not in others]}

    def do(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """Healthy was said, and the agent would start. Raises `unhealthy` with the reason."""
        if memo["units"]:
            self._prove_services(memo["units"], report)
        if inputs.get("brings_agent"):
            self._prove_agent(report)

    def _prove_services(self, names: Sequence[str], report: Report) -> None:
        expected = INFERENCE_UNIT in names
        samples: list[Sample] = []
        away = True
        while True:
            samples.append(self._sample(names, samples, expected))
            if away and answering(samples[-1], expect_inference=expected):
                away = False
                self._report_return(samples[-1], report)
            verdict = judge(samples, self.policy, expect_inference=expected)
            if verdict.health is Health.HEALTHY:
                self._report_backend(samples, report)
                return
            if verdict.health is Health.UNHEALTHY:
                raise OperationError(
                    ErrorCode.UNHEALTHY,
                    f"cannot confirm the new set: {verdict.reason}",
                    f"See why: journalctl -b -n 50 -u {verdict.unit or INFERENCE_UNIT}",
                )
            self.clock.sleep(POLL_S)

    def _prove_agent(self, report: Report) -> None:
        """The agent that makes the change lives on; the one it brings is met at the next boot, which needs it."""
        try:
            self.units.run(AGENT_CHECK, AGENT_TIMEOUT_S)
        except OperationError as error:
            if error.facts.get("exit_status") != _USAGE:
                raise OperationError(
                    ErrorCode.UNHEALTHY,
                    f"cannot confirm the new set: the agent that it brings would not start: {error.message}",
                    error.remedy,
                ) from error
            report.warn("the agent that the set brings could not be asked whether it would start: it is too old")
        unit = self.units.states([AGENT_UNIT])[AGENT_UNIT]
        if unit.load in ("bad-setting", "error"):
            raise OperationError(
                ErrorCode.UNHEALTHY,
                f"cannot confirm the new set: {AGENT_UNIT} that it brings is {unit.load}",
                f"Correct it, with: systemd-analyze verify {AGENT_UNIT}",
            )

    def _sample(self, names: Sequence[str], before: Sequence[Sample], expected: bool) -> Sample:
        test = self._self_test() if before and wants_self_test(before, self.policy) else None
        inference = self._ask() if expected else None
        return Sample(self.clock.monotonic(), self.units.states(names), inference, test)

    def _ask(self) -> InferenceState | None:
        try:
            return self.inference.describe(ASK_TIMEOUT_S)
        except OperationError as error:
            # It answers badly or late. Health counts that as no answer, and its deadlines decide.
            _LOG.info("%s", error.message)
            return None

    def _self_test(self) -> SelfTest:
        try:
            return self.inference.self_test(SELF_TEST_TIMEOUT_S)
        except OperationError as error:
            return SelfTest(passed=False, backend="none", oks=0.0, reason=error.message)

    def _report_return(self, sample: Sample, report: Report) -> None:
        away_s = self.absence.ends()
        if away_s is not None:
            report.fact("away_s", away_s)
        if sample.inference:
            report.fact("first_backend", sample.inference.backend)

    def _report_backend(self, samples: Sequence[Sample], report: Report) -> None:
        last = samples[-1].inference
        if last:
            report.fact("backend", last.backend)
            report.fact("model", last.model)

    def undo(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """Looking changes nothing."""

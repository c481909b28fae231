"""The handlers of a record's steps, and what they say of it; a step whose kind this agent does not know says nothing.

A record may have been begun by another agent: a newer one before a rollback, or an older one before an update.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from agent.change.record import ChangeRecord, Phase, StepRecord
from agent.change.step import CommitStep, Step
from agent.contract.errors import ErrorCode, OperationError

_LOG = logging.getLogger("avocado.change")
_Result = TypeVar("_Result")


class Handlers:
    """The steps that this agent knows, by kind."""

    def __init__(self, steps: Mapping[str, Step]) -> None:
        self._steps = steps

    def of(self, record: ChangeRecord, step: StepRecord) -> Step:
        """Raises `unsupported` where only another agent knows the step."""
        try:
            return self._steps[step.kind]
        except KeyError as cause:
            raise OperationError(
                ErrorCode.UNSUPPORTED,
                f"cannot go on with change {record.number}: this agent does not know the step {step.kind}",
            ) from cause

    def commits(self, step: StepRecord) -> bool:
        """Whether the step is the one that makes its change final."""
        return step.kind in self._steps and self._steps[step.kind].commits

    def are_cancellable(self, begun: Iterable[StepRecord]) -> bool:
        """Whether a change that has come as far as these steps may still be cancelled."""
        return all(step.kind in self._steps and self._steps[step.kind].cancellable for step in [*begun][-1:])

    def commit_happened(self, record: ChangeRecord) -> bool:
        """What the device says, whatever the journal says: a rename that was not synced is gone after a power cut."""
        return any(self.is_committed_by(step) for step in record.steps)

    def is_committed_by(self, step: StepRecord) -> bool:
        """Whether this step committed: no question for one that only another agent knows."""
        if step.phase is Phase.PENDING:
            return False
        handler = self._steps.get(step.kind)
        return isinstance(handler, CommitStep) and guarded(step.kind, lambda: handler.happened(step.inputs))

    def was_over(self, record: ChangeRecord) -> bool:
        """Every step of a change without a commit was done, and only its end is not on the disk.

        It ends as it was told to have ended: undoing it would stop services for a word. What a reboot takes back of it,
        it takes back of any such change.
        """
        known = all(step.kind in self._steps and not self.commits(step) for step in record.steps)
        return known and not record.reverting and all(step.phase is Phase.DONE for step in record.steps)

    def is_gone(self, step: StepRecord, *, rebooted: bool) -> bool:
        """Whether a reboot undid the step by itself. Of one that only another agent knows, its record says so."""
        handler = self._steps.get(step.kind)
        return rebooted and (handler.volatile if handler else step.volatile)

    def knows(self, step: StepRecord) -> bool:
        """Whether this agent has a handler for it."""
        return step.kind in self._steps


def guarded(kind: str, call: Callable[[], _Result]) -> _Result:
    """What a step answers. A bug in it must not leave the board in between, so it is an OperationError `internal`."""
    try:
        return call()
    except OperationError:
        raise
    except Exception as cause:
        _LOG.exception("step %s raised", kind)
        raise OperationError(ErrorCode.INTERNAL, f"cannot finish step {kind}: {cause!r}") from cause

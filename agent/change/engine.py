"""The engine: runs a change's steps, journalled before each effect, and puts the board back when one fails.

It names no step. What it promises, whatever instant the power goes or the agent dies:

- before the commit, the board ends as it was; after it, as was wanted; the record says which and why;
- a step's memo and the phase `doing` are on disk before `do` runs, so whatever happened can be undone;
- the failing or interrupted step is undone too;
- whether the commit happened is asked of the device, never read from the journal alone;
- recovery counts its attempts before anything else; at the limit, or when an undo fails, the change is `stuck`.

An operation runs in the caller's thread, one at a time. `Shutdown` and every other BaseException pass through: the
journal stays as it is and the next start decides. So it is with whatever fails because the board goes down: systemd
then stops what a step starts, and refuses to start what an undo wants back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from agent.change import events
from agent.change.endings import CLOSING, UNDONE_BY_REBOOT, interruption, remedy_of_stuck
from agent.change.handlers import Handlers, guarded
from agent.change.record import ChangeRecord, NewChange, Outcome, Phase, Reason, StepRecord, summary
from agent.change.step import Step
from agent.contract.errors import ErrorCode, OperationError
from agent.ports.protocols import Clock

ATTEMPTS_LIMIT = 5
_TOLD_WITHIN_S = 10.0
_UNDOABLE = (Phase.DOING, Phase.DONE, Phase.UNDOING)

Progress = Callable[[ChangeRecord], None]


class Records(Protocol):
    """The journal, as the engine uses it."""

    def next_number(self) -> int:
        """A number no change has had."""

    def save(self, record: ChangeRecord) -> None:
        """The record is on disk when this returns."""

    def newest(self) -> ChangeRecord | None:
        """The only change that can still be running."""

    def prune(self) -> None:
        """Old records are gone. Never raises: they harm nobody."""


class Engine:
    """Runs new changes and finishes or reverts an interrupted one."""

    def __init__(
        self,
        journal: Records,
        handlers: Mapping[str, Step],
        clock: Clock,
        *,
        goes_down: Callable[[], bool] = lambda: False,
        attempts_limit: int = ATTEMPTS_LIMIT,
    ) -> None:
        self._journal = journal
        self._handlers = Handlers(handlers)
        self._clock = clock
        self._goes_down = goes_down
        self._attempts_limit = attempts_limit
        self._writing = threading.Lock()  # one thread at a time writes records
        self._unsaved: ChangeRecord | None = None  # an end that the disk did not take

    def run(self, change: NewChange, progress: Progress, cancelled: Callable[[], bool]) -> ChangeRecord:
        """Run a change to its end and return the final record. Raises only when the journal cannot take the change."""
        with self._writing:
            # Only the newest change may be running, or a recovery would not find it.
            self._write_late()
            return self._run(change, progress, cancelled)

    def _run(self, change: NewChange, progress: Progress, cancelled: Callable[[], bool]) -> ChangeRecord:
        record = ChangeRecord(
            number=self._journal.next_number(),
            kind=change.kind,
            boot_id=self._clock.boot_id(),
            requested_by=change.requested_by,
            from_runtime=change.from_runtime,
            to_runtime=change.to_runtime,
            steps=tuple(StepRecord(spec.kind, spec.inputs) for spec in change.steps),
            started_at=self._clock.now(),
            facts=dict(change.facts),
        )
        if change.plan_only:
            plan = [{"kind": spec.kind, "inputs": spec.inputs} for spec in change.steps]
            facts = record.facts | {"dry_run": True, "plan": plan}
            record = replace(record, outcome=Outcome.PLANNED, ended_at=record.started_at, steps=(), facts=facts)
        run = _Run(record, self._journal, self._handlers, self._clock, self._goes_down, progress, cancelled)
        run.save()
        self._journal.prune()
        if change.plan_only:
            return run.record
        run.say(events.CHANGE_BEGUN, logging.INFO, f"begun for {record.requested_by}")
        return self._ended(run.to_the_end(), run)

    def write_late(self) -> None:
        """The end of the last change is on the disk, where that was too full for it. For any thread.

        While a change runs nothing happens: it has written that end before it began.
        """
        if self._writing.acquire(blocking=False):
            try:
                self._write_late()
            finally:
                self._writing.release()

    def _write_late(self) -> None:
        if self._unsaved is not None:
            self._journal.save(self._unsaved)
            self._unsaved = None

    def recover(self, progress: Progress) -> ChangeRecord | None:
        """Finish or revert what an earlier start left running; None when there is nothing. Called once, at start.

        Raises OperationError when the journal cannot be read or written: then no change may run.
        """
        with self._writing:
            record = self._journal.newest()
            if record is None or record.outcome is not Outcome.RUNNING:
                return None
            return self._recover(record, progress)

    def _recover(self, record: ChangeRecord, progress: Progress) -> ChangeRecord:
        record = replace(record, attempts=record.attempts + 1)
        run = _Run(record, self._journal, self._handlers, self._clock, self._goes_down, progress, lambda: False)
        run.save()
        if record.attempts > self._attempts_limit:
            why = f"its recovery was cut short {self._attempts_limit} times"
            return self._ended(run.stuck(OperationError(ErrorCode.CHANGE_STUCK, why)), run)
        return self._ended(run.resume(), run)

    def _ended(self, record: ChangeRecord, run: _Run) -> ChangeRecord:
        self._unsaved = None if run.is_saved else record
        return record

    def cancellable(self, record: ChangeRecord) -> bool:
        """Whether a cancellation would still be obeyed."""
        begun = [step for step in record.steps if step.phase is not Phase.PENDING]
        return (
            record.outcome is Outcome.RUNNING
            and not record.reverting
            and not record.committed
            and self._handlers.are_cancellable(begun)
        )


class _Run:
    """One pass over a record. Every change of the record goes through `_put`."""

    def __init__(
        self,
        record: ChangeRecord,
        journal: Records,
        handlers: Handlers,
        clock: Clock,
        goes_down: Callable[[], bool],
        progress: Progress,
        cancelled: Callable[[], bool],
    ) -> None:
        self.record = record
        self._journal = journal
        self._handlers = handlers
        self._clock = clock
        self._goes_down = goes_down
        self._progress = progress
        self._cancelled = cancelled
        self.is_saved = False  # the record as it is now

    def to_the_end(self) -> ChangeRecord:
        if not self.record.reverting:
            try:
                self._forward()
            except OperationError as error:
                self._leave_if_going_down()
                self._turn_back(error)
        if not self.record.reverting:
            return self._end(Outcome.APPLIED)
        try:
            self._backward()
        except OperationError as error:
            self._leave_if_going_down()
            return self.stuck(error)
        reason = self.record.reason
        cancelled = reason is not None and reason.code is ErrorCode.CHANGE_CANCELLED
        return self._end(Outcome.CANCELLED if cancelled else Outcome.REVERTED)

    def resume(self) -> ChangeRecord:
        """Go on after an interruption: forward past the commit, back before it."""
        self.say(events.CHANGE_RECOVERED, logging.WARNING, f"was interrupted; attempt {self.record.attempts}")
        if self.record.reverting:
            return self.to_the_end()
        if self._handlers.was_over(self.record):
            return self._end(Outcome.APPLIED)
        try:
            committed = self._handlers.commit_happened(self.record)
        except OperationError as error:
            return self.stuck(error)
        self._put(committed=committed)
        if not committed:
            self._turn_back(interruption(self.record, self._clock.boot_id()))
        return self.to_the_end()

    def stuck(self, error: OperationError) -> ChangeRecord:
        reason = self.record.reason
        before = f"; it failed because: {reason.message}" if reason and reason.message != error.message else ""
        self._put(
            reason=Reason(
                ErrorCode.CHANGE_STUCK, f"{error.message}{before}", remedy_of_stuck(self.record, error.remedy)
            )
        )
        return self._end(Outcome.STUCK)

    def save(self) -> None:
        self.is_saved = False
        self._journal.save(self.record)
        self.is_saved = True
        self._progress(self.record)

    def say(self, message_id: str, level: int, text: str, **fields: Any) -> None:
        """One line about this change in the journal of the system."""
        record = self.record
        events.event(
            message_id, level, f"change {record.number} ({record.kind}) {text}", CHANGE_ID=record.number, **fields
        )

    def _forward(self) -> None:
        for index, step in enumerate(self.record.steps):
            if step.phase is Phase.DONE:
                continue
            began_s = self._clock.monotonic()
            try:
                self._stop_if_cancelled(self.record.steps[:index])
                self._do(index)
                warning = ""
            except OperationError as error:
                if not self._is_final(index):
                    raise
                # Past the commit nothing goes back: what is left undone is a warning and the next change's work.
                warning = error.message
                self.say(events.STEP_WARNING, logging.WARNING, f"{step.kind}: {warning}", STEP=step.kind)
            self._add_duration(step.kind, self._clock.monotonic() - began_s)
            self._put_step(index, phase=Phase.DONE, **({"warning": warning} if warning else {}))
            if self._handlers.commits(step):
                self._put(committed=True)
            self._save_after_effect()

    def _do(self, index: int) -> None:
        step = self.record.steps[index]
        handler = self._handlers.of(self.record, step)
        if step.phase is Phase.PENDING:
            memo = guarded(step.kind, lambda: handler.prepare(step.inputs))
            self._put_step(index, phase=Phase.DOING, memo=memo, volatile=handler.volatile)
            self.save()
            step = self.record.steps[index]
        try:
            guarded(step.kind, lambda: handler.do(step.inputs, step.memo, _Report(self, index)))
        except OperationError as error:
            if not self._handlers.is_committed_by(step):
                raise
            # It failed after its atomic effect. `do` reaches a state, so doing it again reaches what is left of it.
            self.say(events.STEP_WARNING, logging.WARNING, f"{step.kind}: again after {error.message}", STEP=step.kind)
            guarded(step.kind, lambda: handler.do(step.inputs, step.memo, _Report(self, index)))

    def _backward(self) -> None:
        rebooted = self.record.boot_id != self._clock.boot_id()
        for index in reversed(range(len(self.record.steps))):
            step = self.record.steps[index]
            if step.phase not in _UNDOABLE:
                continue
            if not self._handlers.is_gone(step, rebooted=rebooted):
                self._undo(index)
            elif not self._handlers.knows(step):
                _Report(self, index).warn(UNDONE_BY_REBOOT)
            self._put_step(index, phase=Phase.UNDONE)
            self._save_or_go_on()

    def _undo(self, index: int) -> None:
        step = self.record.steps[index]
        handler = self._handlers.of(self.record, step)
        self._put_step(index, phase=Phase.UNDOING)
        self._save_or_go_on()
        guarded(step.kind, lambda: handler.undo(step.inputs, step.memo, _Report(self, index)))

    def _leave_if_going_down(self) -> None:
        """Raises Shutdown where a step failed only because the board, or the agent, is being stopped."""
        self._clock.sleep(0)  # where the agent was told already, this raises
        if self._goes_down():
            # The agent is stopped in the same moment as whatever failed, and its word may be on the way.
            self._clock.sleep(_TOLD_WITHIN_S)

    def _turn_back(self, error: OperationError) -> None:
        step = self.record.step
        where = step.kind if step else ""
        self.say(events.STEP_FAILED, logging.WARNING, f"turns back: {error.message}", STEP=where)
        self._put(reverting=True, reason=Reason.of(error))
        self._save_or_go_on()

    def _end(self, outcome: Outcome) -> ChangeRecord:
        self._put(outcome=outcome, ended_at=self._clock.now())
        self._save_or_go_on()
        message_id, level = CLOSING[outcome]
        events.event(message_id, level, summary(self.record), CHANGE_ID=self.record.number)
        return self.record

    def _is_final(self, index: int) -> bool:
        return self.record.committed or self._handlers.is_committed_by(self.record.steps[index])

    def _stop_if_cancelled(self, begun: tuple[StepRecord, ...]) -> None:
        if not self.record.committed and self._handlers.are_cancellable(begun) and self._cancelled():
            raise OperationError(
                ErrorCode.CHANGE_CANCELLED, f"cannot finish change {self.record.number}: it was cancelled"
            )

    def _save_after_effect(self) -> None:
        try:
            self.save()
        except OperationError as error:
            if not self.record.committed:
                raise
            self._note_unsaved(error)

    def _save_or_go_on(self) -> None:
        # A full disk must not keep the board from going back; the next start would only undo once more.
        try:
            self.save()
        except OperationError as error:
            self._note_unsaved(error)

    def _note_unsaved(self, error: OperationError) -> None:
        self.say(events.STEP_WARNING, logging.WARNING, f"goes on without its record: {error.message}")
        self._progress(self.record)

    def _add_duration(self, kind: str, seconds: float) -> None:
        took_s = self.record.facts.get("took_s", {})
        self._put(facts=self.record.facts | {"took_s": took_s | {kind: round(took_s.get(kind, 0.0) + seconds, 3)}})

    def _put(self, **changes: Any) -> None:
        self.record = replace(self.record, **changes)

    def _put_step(self, index: int, **changes: Any) -> None:
        self.record = self.record.with_step(index, **changes)


class _Report:
    """The Report of one step."""

    def __init__(self, run: _Run, index: int) -> None:
        self._run = run
        self._index = index

    def stop_if_cancelled(self) -> None:
        if not self._run.record.reverting:
            self._run._stop_if_cancelled(self._run.record.steps[: self._index + 1])

    def progress(self, done: int, total: int) -> None:
        self.stop_if_cancelled()
        self._run._put(facts=self._run.record.facts | {"bytes_done": done, "bytes_total": total})
        self._run._progress(self._run.record)

    def fact(self, name: str, value: Any) -> None:
        self._run._put(facts=self._run.record.facts | {name: value})

    def warn(self, message: str) -> None:
        step = self._run.record.steps[self._index]
        undoing = step.phase is Phase.UNDOING
        where = f"undo {step.kind}" if undoing else step.kind
        self._run.say(events.STEP_WARNING, logging.WARNING, f"{where}: {message}", STEP=step.kind)
        said = f"while going back: {message}" if undoing else message
        if said not in step.warning:  # an undo that was cut short says it again
            self._run._put_step(self._index, warning=f"{step.warning}; {said}" if step.warning else said)

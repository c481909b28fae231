"""One backend's lane in the supervisor: its worker, the one task that worker is on, and its deadlines.

A lane turns what happens (a record, a death, a deadline) into the policy's events, carries the resulting action out,
and tells the supervisor as a list of outcomes. It never blocks. Answers of an older generation or another sequence
number are dropped here. A lane starts a worker only when the policy says so, which is after the one before is reaped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from inference.deadlines import Latencies, first_invoke_s
from inference.launcher import Launcher
from inference.orders import LaneOrder
from inference.outcomes import Late, Lost, Outcome, Posed, Tested
from inference.policy import (
    Action,
    Answered,
    Backend,
    Ended,
    Event,
    Failed,
    GoldenPassed,
    Life,
    Phase,
    Ready,
    Reason,
    ResetDone,
    SoftMissed,
    Tick,
    Unkillable,
    Wanted,
    decide,
)
from inference.processes import Pipes, WorkerProcess
from inference.reaping import Reaper
from inference.records import RECORD_LIMIT, Kind, Token, WorkerPose, kind_of, unpack_note
from inference.reset import ResetDoor
from inference.task import Task

# A zygote imports the runtime first, which a cold, busy board does in seconds.
_LAUNCH_S = 30.0
_SLOW_PROBE_S = 0.2
Log = Callable[[str, Backend, Life], None]


class Lane:
    """See the module."""

    def __init__(self, order: LaneOrder, launcher: Launcher, door: ResetDoor, log: Log) -> None:
        self.backend = order.backend
        self.life = Life()
        self.worker: WorkerProcess | None = None
        self.latencies = Latencies()
        self.restarts = 0
        self.concluded_first_invoke = False
        # Of a graph that was kept, and of one that had to be compiled: the first says nothing about the second.
        self.first_invoke_s: dict[bool, float] = {}
        self.last_oks = 0.0
        self.message = self.remedy = ""
        self.model: Mapping[str, str] = {}
        self.order = order
        self._launcher = launcher
        self._door = door
        self._log = log
        self._generation = 0
        self._pending: Pipes | None = None
        self._reaper = Reaper()
        self._task: Task | None = None
        self._stage_deadline: float | None = None
        self._fresh = True
        self._compiles = False
        self._golden_at = 0.0
        self._oks_min = 1.0
        self._outcomes: list[Outcome] = []

    @property
    def serving(self) -> bool:
        """Whether frames may be sent here."""
        return self.life.phase is Phase.SERVING

    @property
    def idle(self) -> bool:
        """Whether the worker waits for a token."""
        return self.worker is not None and self._task is None

    @property
    def late(self) -> bool:
        """Whether the worker is past its soft deadline."""
        return self._task is not None and self._task.late

    def descriptors(self) -> list[int]:
        """What to wait on."""
        waited = self._reaper.descriptors()
        if self.worker is not None:
            waited.append(self.worker.pidfd)
            if not self.worker.hung_up:
                waited.append(self.worker.pipes.answers_in)
        return waited

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the latest."""
        times = []
        if self._task is not None:
            times.append(self._task.next_at)
        elif self.idle and self.life.phase in (Phase.PROVING, Phase.SERVING):
            times.append(self._golden_at)
        if self._stage_deadline is not None:
            times.append(self._stage_deadline)
        if self.life.phase is Phase.BACKING_OFF:
            times.append(self.life.retry_at)
        overdue_at = self._reaper.overdue_at(self.order.reap_s)
        if self.life.phase is Phase.ENDING and overdue_at is not None:
            times.append(overdue_at)
        return min(times, default=None)

    def ask(self, sequence: int, slot: int, now: float) -> bool:
        """Send a frame to the idle worker; False, and the lane has failed, when it cannot take it."""
        return self._send(Kind.FRAME, sequence, slot, now)

    def wake(self, now: float) -> None:
        """Somebody asks for this backend; one that was closed for want of work opens again."""
        self._happened(Wanted(), now)

    def test_soon(self, now: float) -> None:
        """Run the golden frame as soon as the worker is idle."""
        self._golden_at = min(self._golden_at, now)

    def collect(self) -> list[Outcome]:
        """What has happened since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def tick(self, now: float, *, frames_wait: bool) -> None:
        """Let time pass: deadlines, retries, reaping, and the golden frame when nobody waits for this lane."""
        self._expire_stage(now)
        self._expire_task(now)
        overdue_at = self._reaper.overdue_at(self.order.reap_s)
        if overdue_at is not None and self.life.phase is Phase.ENDING and now >= overdue_at:
            self._happened(Unkillable(len(self._reaper.pids())), now)
        if self._door.waiting:
            self._look_for_reset(now)
        self._happened(Tick(), now)
        if self.idle and self._golden_is_due(now, frames_wait=frames_wait):
            self._golden_at = now + self.order.golden_every_s
            self._send(Kind.GOLDEN, 0, 0, now)

    def keep_book(self, now: float) -> None:
        """Begin to watch the worker of a late frame. That reads /proc, so the CPU has been given the frame before."""
        task, worker = self._task, self.worker
        if task is not None and worker is not None and task.late and not task.watched_at:
            task.watch(worker.pid, now)

    def launched(self, generation: int, pid: int, now: float) -> None:
        """The zygote's reply: `pid` runs our generation, or 0 when it could not fork."""
        if self._pending is None or generation != self._generation:
            return
        pipes, self._pending = self._pending, None
        if pid == 0:
            pipes.close_our_ends()
            self._fail(Failed(Reason.ERROR), now, "cannot start a worker: the machine has no room for a process")
            return
        self.worker = WorkerProcess(generation, pid, os.pidfd_open(pid), pipes)
        self._stage_deadline = now + self.order.limits.create_s

    def launch_failed(self, now: float) -> None:
        """The zygote died with our request."""
        if self._pending is not None:
            self._fail(Failed(Reason.CRASHED), now, "cannot start a worker: the zygote died")

    def readable(self, descriptor: int, now: float) -> None:
        """Read what one of `descriptors` has for us."""
        worker = self.worker
        if worker is not None and descriptor == worker.pipes.answers_in:
            self._read_answer(worker, now)
        elif worker is not None and descriptor == worker.pidfd:
            while self.worker is worker and not worker.hung_up:
                self._read_answer(worker, now)
            if self.worker is worker:
                self._fail(Failed(Reason.CRASHED), now, f"cannot go on: the {self.backend} worker died")
        self.reap(now)

    def end(self, now: float) -> None:
        """Kill whatever runs here; `reaped` tells when it is over."""
        self._discard_worker(now)

    def pids(self) -> list[int]:
        """Every worker of this lane that is not reaped."""
        return [*self._reaper.pids(), *([self.worker.pid] if self.worker is not None else [])]

    @property
    def reaped(self) -> bool:
        """Whether no process of this lane is left."""
        return self.worker is None and not self._reaper.pids()

    # -- records ------------------------------------------------------------------------------------------------------

    def _read_answer(self, worker: WorkerProcess, now: float) -> None:
        try:
            raw = os.read(worker.pipes.answers_in, RECORD_LIMIT)
        except BlockingIOError:
            # Its pidfd woke us while it lives no more, yet a child of its library still holds the pipe.
            worker.hung_up = True
            return
        if not raw:
            worker.hung_up = True
            self._fail(Failed(Reason.CRASHED), now, f"cannot go on: the {self.backend} worker died")
        elif kind_of(raw) is Kind.POSE:
            self._take_pose(WorkerPose.unpack(raw), now)
        else:
            self._take_note(unpack_note(raw), now)

    def _take_pose(self, answer: WorkerPose, now: float) -> None:
        task = self._task
        if task is None or answer.generation != self._generation or answer.sequence != task.sequence:
            return
        self._task = None
        latency_ms = (now - task.sent_at) * 1000
        if task.kind is Kind.GOLDEN:
            self._judge(answer, latency_ms, task, now)
            return
        self.latencies.add(latency_ms)
        if not task.late:
            self._happened(Answered(), now)
        self._outcomes.append(Posed(answer.sequence, answer.pose))

    def _judge(self, answer: WorkerPose, latency_ms: float, task: Task, now: float) -> None:
        if self._fresh:
            self._fresh = False
            self.concluded_first_invoke = True
            seen_s = self.first_invoke_s.get(self._compiles, 0.0)
            self.first_invoke_s[self._compiles] = max(seen_s, latency_ms / 1000)
        self.last_oks = answer.oks
        passed = answer.oks >= self._oks_min
        reason = Reason.OK if passed else Reason.WRONG_RESULT
        self._outcomes.append(Tested(passed, answer.oks, reason, latency_ms))
        if passed:
            self._golden_at = now + _SLOW_PROBE_S if task.late else self._golden_at
            worker = self.worker
            if task.late and self.life.reason is Reason.SLOW and worker is not None and task.starved(worker.pid, now):
                # A fresh worker would get no more of the CPU than this one: it is not the NPU that is slow.
                return
            self._happened(GoldenPassed(task.late), now)
            return
        message = f"cannot trust the {self.backend}: its golden frame has OKS {answer.oks:.3f}, under {self._oks_min}"
        # The CPU computes the same again: then it is the model that is wrong, or its golden pose.
        hopeless = self.backend is Backend.CPU and self.life.phase is Phase.PROVING
        self._fail(Failed(reason, permanent=hopeless), now, message)

    def _take_note(self, note: Mapping[str, Any], now: float) -> None:
        stage = note["stage"]
        if stage == "prepare":
            self._stage_deadline = now + self.order.limits.prepare_s
        elif stage == "ready":
            self._stage_deadline = None
            self._oks_min = note["oks_min"]
            self._compiles = note["compiles"]
            self.model = {key: note[key] for key in ("model", "version", "runtime")}
            self._happened(Ready(), now)
        else:
            self._fail(Failed(Reason(note["reason"]), note["permanent"]), now, note["message"], note["remedy"])

    # -- deadlines ----------------------------------------------------------------------------------------------------

    def _golden_is_due(self, now: float, *, frames_wait: bool) -> bool:
        if self.life.phase is Phase.PROVING:
            return now >= self._golden_at
        # Frames come first, but a saturated lane is tested too.
        return self.serving and now >= self._golden_at + (1.0 if frames_wait else 0.0)

    def _send(self, kind: Kind, sequence: int, slot: int, now: float) -> bool:
        worker = self.worker
        if worker is None:
            raise AssertionError("a token needs a worker")
        soft_s, hard_s = self.latencies.soft_s(self.order.limits), self.latencies.hard_s(self.order.limits)
        if kind is Kind.GOLDEN and self._fresh:
            soft_s = hard_s = first_invoke_s(self.order.limits, self.first_invoke_s.get(self._compiles))
        self._task = Task.sent(kind, sequence, now, soft_s, hard_s)
        if kind is Kind.GOLDEN:
            self._task.watch(worker.pid, now)
        if worker.send(Token(kind, self._generation, sequence, slot)):
            return True
        self._fail(Failed(Reason.CRASHED), now, f"cannot go on: the {self.backend} worker takes no more tokens")
        return False

    def _expire_stage(self, now: float) -> None:
        if self._stage_deadline is None or now < self._stage_deadline:
            return
        if self._pending is not None:
            # The zygote itself does not answer. Its end is reported to `launch_failed`.
            self._stage_deadline = None
            self._launcher.kill()
        else:
            self._fail(Failed(Reason.HUNG), now, f"cannot start the {self.backend}: its worker hangs while it prepares")

    def _expire_task(self, now: float) -> None:
        task, worker = self._task, self.worker
        if task is None or worker is None or now < task.soft_at:
            return
        if not task.late:
            task.late = True
            # The CPU has nobody to ask; its hard deadline is all there is.
            if task.kind is Kind.FRAME and self.backend is Backend.NPU:
                action = self._happened(SoftMissed(), now)
                if action in (Action.ASK_CPU, Action.DEMOTE):
                    self._outcomes.append(Late(task.sequence))
        if task.hung(worker.pid, now):
            waited_ms = (now - task.sent_at) * 1000
            message = f"cannot go on: the {self.backend} gave no answer in {waited_ms:.0f} ms"
            self._fail(Failed(Reason.HUNG), now, message)

    def _look_for_reset(self, now: float) -> None:
        # An NPU in quarantine waits for its worker's death anyway; any other for as long as the policy says.
        overdue = self.life.phase is not Phase.QUARANTINED and now >= self.life.retry_at
        answer = self._door.answer(overdue=overdue)
        if answer is not None:
            self._log(
                f"{answer.rung} {'done' if answer.done else 'refused'}: {answer.message}", self.backend, self.life
            )
            if not answer.done:
                self.message, self.remedy = f"cannot {answer.rung} for the {self.backend}: {answer.message}", ""
            self._happened(ResetDone(answer.done), now)

    # -- actions ------------------------------------------------------------------------------------------------------

    def _fail(self, event: Failed, now: float, message: str, remedy: str = "") -> None:
        self.message, self.remedy = message, remedy
        self._happened(event, now)

    def _happened(self, event: Event, now: float) -> Action:
        before = self.life
        self.life, action = decide(before, event, now, self.order.rules)
        match action:
            case Action.START:
                self._start(now)
            case Action.REPLACE:
                self._log(self.message, self.backend, self.life)
                self.restarts += 1
                self.concluded_first_invoke = True
                self._discard_worker(now)
            case Action.CLOSE:
                self._log(f"the {self.backend} is closed: no frame for a while", self.backend, self.life)
                self._discard_worker(now)
            case Action.RESET:
                self._log(f"{self.life.rung} for the {self.backend}: {self.message}", self.backend, self.life)
                self._door.ask(self.life.rung)
            case Action.PROVE:
                self._golden_at = now
            case Action.DEMOTE:
                self._golden_at = now + _SLOW_PROBE_S
                late = f"it was late {self.order.rules.slow_limit} times in a row"
                self.message = f"cannot rely on the {self.backend}: {late}"
                self._log(self.message, self.backend, self.life)
            case Action.SERVE:
                self._golden_at = now + self.order.golden_every_s
                self.message = self.remedy = ""
                self._log(f"the {self.backend} serves", self.backend, self.life)
            case Action.QUARANTINE | Action.GIVE_UP:
                if action is Action.GIVE_UP and not self.remedy:
                    self.remedy = "restart pose.service to try it again"
                self._log(f"the {self.backend} is {self.life.phase}: {self.message}", self.backend, self.life)
            case Action.KEEP | Action.ASK_CPU:
                pass
        return action

    def _start(self, now: float) -> None:
        self._generation += 1
        self._fresh = True
        self._stage_deadline = now + _LAUNCH_S
        self._pending = Pipes.open()
        if not self._launcher.launch(self.backend, self._generation, self.order.worker, self._pending):
            self.launch_failed(now)

    def _discard_worker(self, now: float) -> None:
        reason, self._stage_deadline = self.life.reason, None
        task, self._task = self._task, None
        if task is not None and task.kind is Kind.FRAME:
            self._outcomes.append(Lost(task.sequence, reason))
        elif task is not None:
            self._outcomes.append(Tested(passed=False, oks=0.0, reason=reason, latency_ms=0.0))
        if self._pending is not None:
            self._pending.close_our_ends()
            self._pending = None
        worker, self.worker = self.worker, None
        if worker is None:
            self._happened(Ended(), now)
            return
        self._reaper.kill(worker, now)
        self.reap(now)

    def reap(self, now: float) -> None:
        """Collect workers that have died. Never waits."""
        for pid, ended, awaited in self._reaper.collect():
            if ended not in ("SIGKILL", "status 0"):
                self._log(f"the {self.backend} worker {pid} ended by {ended}", self.backend, self.life)
            if awaited:
                self._happened(Ended(), now)

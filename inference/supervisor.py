"""The frame loop between the service and the workers: a plain loop, one thread, no numpy and no runtime.

Every frame the service asks for is answered by the NPU, by the CPU in its place, or refused in bounded time. At the
NPU's soft deadline the same frame goes to the CPU as well and the first good pose wins; when the NPU's worker fails,
the CPU gets the frame at once and nobody waits for the death. The loop never blocks but in `select`, beats at least
twice a second, and ends when the service does. Measured reasons for this shape are in docs/architecture.md.
"""

from __future__ import annotations

import gc
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inference.deadlines import Latencies
from inference.lane import Lane
from inference.launcher import Launcher
from inference.orders import LaneOrder, Orders
from inference.outcomes import Late, Lost, Outcome, Posed, Tested
from inference.policy import Backend, Life, Phase, Reason
from inference.priorities import Priorities
from inference.processes import adopt_orphans, die_with_parent, ignore_stop_signals, sharpen_timers
from inference.records import NOTE_LIMIT, Ask, Kind, Reply, kind_of, pack_note, unpack_note
from inference.reset import ResetDoor

_BEAT_S = 0.5
_STOP_PATIENCE_S = 1.5
_ATTEMPTS = 3


@dataclass(slots=True)
class Job:
    """A frame that is not answered yet. `fallback` is why the CPU was asked beside or instead of the NPU."""

    sequence: int
    slot: int
    arrived_at: float
    asked: set[Backend] = field(default_factory=set)
    fallback: Reason | None = None
    losses: int = 0


class Supervisor:
    """See the module."""

    def __init__(self, orders: Orders, link: socket.socket, launcher: Launcher) -> None:
        self._orders = orders
        self._link = link
        self._launcher = launcher
        self._lanes = {order.backend: self._lane(order, launcher) for order in orders.lanes}
        self._npu = self._lanes.get(Backend.NPU)
        self._cpu = self._lanes.get(Backend.CPU)
        self._jobs: deque[Job] = deque()
        self._tests: list[tuple[int, Backend]] = []
        self._latencies = Latencies()
        self._frames = self._fallbacks = 0
        self._reported = (Backend.NONE, Reason.STARTING)
        self._next_beat = 0.0
        self._stopping = False
        self._priorities = Priorities()

    def _lane(self, order: LaneOrder, launcher: Launcher) -> Lane:
        door = ResetDoor(Path(self._orders.reset_request), Path(self._orders.reset_answer))
        return Lane(order, launcher, door, self._log)

    def run(self) -> None:
        """Serve until the service says stop or is gone, then end every worker."""
        now = time.monotonic()
        self._priorities.raise_own(self._orders.fifo_priority)
        while not self._stopping:
            self._step(now)
            now = self._wait(self._next_time(now))
        self._end_workers()

    # -- one turn of the loop -----------------------------------------------------------------------------------------

    def _step(self, now: float) -> None:
        frames_wait = any(not job.asked for job in self._jobs)
        serving = self._serving()
        for lane in self._lanes.values():
            lane.tick(now, frames_wait=frames_wait and lane is serving)
        # Dispatch first: a worker that has just answered gets its next token before its answer goes out. Again while
        # something comes of it: one found dead when asked gives its frame back, and the other must have it now.
        for _ in range(_ATTEMPTS):
            self._dispatch(now)
            if not self._settle(now):
                break
        for lane in self._lanes.values():
            lane.keep_book(now)
        self._priorities.arrange(self._npu, self._cpu, now)
        self._report_switch(now)
        self._launcher.reap()
        if now >= self._next_beat:
            self._send_state(now)

    def _wait(self, until: float) -> float:
        """Handle what arrives until then; returns the time after."""
        waited = [self._link.fileno(), *self._launcher.descriptors()]
        lanes = {descriptor: lane for lane in self._lanes.values() for descriptor in lane.descriptors()}
        # select and not poll: poll rounds timeouts up to whole milliseconds. It keeps the order it is given, so the
        # zygote's replies, which open descriptors, are read before anything that closes some.
        ready, _, _ = select.select([*waited, *lanes], [], [], max(0.0, until - time.monotonic()))
        now = time.monotonic()
        for descriptor in ready:
            if descriptor in lanes:
                # Reading one may have closed the next: only what the lane still waits on is read.
                if descriptor in lanes[descriptor].descriptors():
                    lanes[descriptor].readable(descriptor, now)
            elif descriptor == self._link.fileno():
                self._read_link(now)
            else:
                self._read_launcher(now)
        return now

    def _next_time(self, now: float) -> float:
        times = [self._next_beat, *(lane.next_deadline() or self._next_beat for lane in self._lanes.values())]
        if self._jobs:
            times.append(self._jobs[0].arrived_at + self._orders.answer_timeout_s)
        # A deadline that stays in the past would spin at a real-time priority; it may cost a tenth of a millisecond.
        return max(min(times), now + 0.0001)

    # -- frames -------------------------------------------------------------------------------------------------------

    def _dispatch(self, now: float) -> None:
        for job in list(self._jobs):
            lane = self._lane_for(job)
            if lane is not None:
                job.asked.add(lane.backend)
                lane.ask(job.sequence, job.slot, now)
            elif not job.asked and (self._hopeless() or now >= job.arrived_at + self._orders.answer_timeout_s):
                self._refuse(job)

    def _lane_for(self, job: Job) -> Lane | None:
        """Who computes this job next; None: nobody can now, or nobody needs to."""
        npu, cpu = self._npu, self._cpu
        cpu_free = cpu is not None and cpu.serving and cpu.idle and Backend.CPU not in job.asked
        if not job.asked and npu is not None and npu.serving:
            if npu.idle:
                return npu
            if not npu.late:
                return None
        if not job.asked or job.fallback is not None:
            return cpu if cpu_free else None
        return None

    def _settle(self, now: float) -> bool:
        """Act on what the lanes report; whether they reported anything."""
        outcomes = [(lane, outcome) for lane in self._lanes.values() for outcome in lane.collect()]
        for lane, outcome in outcomes:
            self._take(lane, outcome, now)
        return bool(outcomes)

    def _take(self, lane: Lane, outcome: Outcome, now: float) -> None:
        if isinstance(outcome, Tested):
            self._report_test(lane, outcome)
            return
        job = next((job for job in self._jobs if job.sequence == outcome.sequence), None)
        if job is None:
            return
        match outcome:
            case Posed():
                self._answer(job, lane, outcome.pose, now)
            case Late():
                job.fallback = Reason.SLOW
            case Lost():
                job.asked.discard(lane.backend)
                job.losses += 1
                if lane.backend is Backend.NPU:
                    job.fallback = outcome.reason
                if job.losses >= _ATTEMPTS:
                    self._refuse(job)

    def _answer(self, job: Job, lane: Lane, pose: bytes, now: float) -> None:
        self._jobs.remove(job)
        fell_back = lane.backend is Backend.CPU and self._npu is not None
        reason = Reason.OK if lane.backend is Backend.NPU else job.fallback or self._why_cpu()
        self._frames += 1
        self._fallbacks += fell_back
        self._send(Reply(job.sequence, lane.backend, reason, fell_back, pose).pack())
        self._latencies.add((now - job.arrived_at) * 1000)

    def _refuse(self, job: Job) -> None:
        self._jobs.remove(job)
        lane = self._failed_lane()
        message = lane.message if lane is not None and lane.message else "cannot answer: no backend serves yet"
        remedy = lane.remedy if lane is not None else ""
        self._send(pack_note({"event": "refused", "sequence": job.sequence, "message": message, "remedy": remedy}))

    def _hopeless(self) -> bool:
        return all(lane.life.phase is Phase.GAVE_UP for lane in self._lanes.values())

    def _failed_lane(self) -> Lane | None:
        return next((lane for lane in self._lanes.values() if lane.message), None)

    # -- who serves ---------------------------------------------------------------------------------------------------

    def _serving(self) -> Lane | None:
        return next((lane for lane in (self._npu, self._cpu) if lane is not None and lane.serving), None)

    def _why_cpu(self) -> Reason:
        if self._npu is None:
            return Reason.NO_NPU
        # It serves, and is late with a frame that has been answered: the next one does not wait for it.
        return Reason.SLOW if self._npu.serving else self._npu.life.reason

    def _current(self) -> tuple[Backend, Reason]:
        lane = self._serving()
        if lane is None:
            first = self._npu or self._cpu
            return Backend.NONE, first.life.reason if first is not None else Reason.STARTING
        return lane.backend, Reason.OK if lane is self._npu else self._why_cpu()

    def _report_switch(self, now: float) -> None:
        current = self._current()
        if current == self._reported:
            return
        before, self._reported = self._reported, current
        self._send_state(now)
        if before[0] is not current[0]:
            self._send(pack_note({"event": "switched", "from": before[0], "to": current[0], "reason": current[1]}))

    # -- self-test ----------------------------------------------------------------------------------------------------

    def _start_test(self, number: int, now: float) -> None:
        if self._npu is not None:
            self._npu.wake(now)
        lane = self._serving()
        if lane is None:
            backend, reason = self._current()
            failed = self._failed_lane()
            oks = failed.last_oks if failed is not None else 0.0
            self._send_test(number, backend, passed=False, oks=oks, reason=reason, latency_ms=0.0)
            return
        self._tests.append((number, lane.backend))
        lane.test_soon(now)

    def _report_test(self, lane: Lane, outcome: Tested) -> None:
        done = [number for number, backend in self._tests if backend is lane.backend]
        self._tests = [test for test in self._tests if test[1] is not lane.backend]
        reason = outcome.reason
        if outcome.passed and lane.backend is Backend.CPU:
            reason = self._why_cpu()
        for number in done:
            self._send_test(
                number,
                lane.backend,
                passed=outcome.passed,
                oks=outcome.oks,
                reason=reason,
                latency_ms=outcome.latency_ms,
            )

    def _send_test(
        self, number: int, backend: Backend, *, passed: bool, oks: float, reason: Reason, latency_ms: float
    ) -> None:
        result = {"passed": passed, "backend": backend, "oks": oks, "reason": reason, "latency_ms": latency_ms}
        self._send(pack_note({"event": "tested", "number": number, **result}))

    # -- the link -----------------------------------------------------------------------------------------------------

    def _read_link(self, now: float) -> None:
        try:
            raw = self._link.recv(NOTE_LIMIT)
        except ConnectionResetError:
            raw = b""
        if not raw:
            self._stopping = True
        elif kind_of(raw) is Kind.FRAME:
            ask = Ask.unpack(raw)
            self._jobs.append(Job(ask.sequence, ask.slot, now))
            if self._npu is not None and self._npu.life.phase is Phase.IDLE:
                self._npu.wake(now)
        else:
            note = unpack_note(raw)
            if note["do"] == "stop":
                self._stopping = True
            else:
                self._start_test(note["number"], now)

    def _read_launcher(self, now: float) -> None:
        replies = self._launcher.replies()
        if replies is None:
            self._launcher.kill_strays({pid for lane in self._lanes.values() for pid in lane.pids()})
            for lane in self._lanes.values():
                lane.launch_failed(now)
            return
        for reply in replies:
            self._lanes[reply.backend].launched(reply.generation, reply.pid, now)

    def _send(self, record: bytes) -> None:
        try:
            self._link.send(record, socket.MSG_DONTWAIT)
        except BlockingIOError:
            # The service does not read: it gets no state and its own deadline tells it about the frame.
            return
        except (BrokenPipeError, ConnectionResetError):
            self._stopping = True

    def _log(self, message: str, backend: Backend, life: Life) -> None:
        note = {"message": message, "backend": backend, "phase": life.phase, "reason": life.reason}
        self._send(pack_note({"event": "log", **note}))

    def _send_state(self, now: float) -> None:
        self._next_beat = now + _BEAT_S
        backend, reason = self._current()
        first = self._npu or self._cpu
        failed = self._failed_lane()
        model = next((lane.model for lane in self._lanes.values() if lane.model), {})
        state = {
            "phase": first.life.phase if first is not None else Phase.GAVE_UP,
            "backend": backend,
            "reason": reason,
            "frames": self._frames,
            "fallbacks": self._fallbacks,
            "restarts": sum(lane.restarts for lane in self._lanes.values()),
            "latency_ms": self._latencies.percentiles(),
            "first_invoke_done": first is not None and first.concluded_first_invoke,
            "heartbeat_monotonic": now,
            "workers": {lane.backend: lane.worker.pid for lane in self._lanes.values() if lane.worker is not None},
            "model": model,
            "scheduling": self._priorities.description,
            "message": failed.message if failed is not None else "",
            "remedy": failed.remedy if failed is not None else "",
            "backends": {lane.backend: self._lane_state(lane) for lane in self._lanes.values()},
        }
        self._send(pack_note({"event": "state", "state": state}))

    @staticmethod
    def _lane_state(lane: Lane) -> dict[str, Any]:
        return {
            "phase": lane.life.phase,
            "reason": lane.life.reason,
            "failures": lane.life.failures,
            "restarts": lane.restarts,
            "oks": lane.last_oks,
            "first_invoke_ms": max(lane.first_invoke_s.values()) * 1000 if lane.first_invoke_s else None,
            "soft_ms": lane.latencies.soft_s(lane.order.limits) * 1000,
            "hard_ms": lane.latencies.hard_s(lane.order.limits) * 1000,
            "message": lane.message,
            "remedy": lane.remedy,
        }

    def _end_workers(self) -> None:
        now = time.monotonic()
        deadline = now + _STOP_PATIENCE_S
        self._launcher.kill()
        for lane in self._lanes.values():
            lane.end(now)
        while now < deadline and not all(lane.reaped for lane in self._lanes.values()):
            waited = [descriptor for lane in self._lanes.values() for descriptor in lane.descriptors()]
            select.select(waited, [], [], deadline - now)
            now = time.monotonic()
            for lane in self._lanes.values():
                lane.reap(now)


def main(arguments: Sequence[str]) -> None:
    """`arguments`: descriptors of the link's socket and of the frames, and the service's pid."""
    link_fd, frames_fd, service_pid = (int(argument) for argument in arguments)
    die_with_parent(service_pid)
    ignore_stop_signals()
    adopt_orphans()
    sharpen_timers()
    link = socket.socket(fileno=link_fd)
    raw = link.recv(NOTE_LIMIT)
    if not raw:
        return
    supervisor = Supervisor(Orders.parse(unpack_note(raw)), link, Launcher(frames_fd))
    gc.collect()
    gc.freeze()
    supervisor.run()
    sys.stderr.flush()

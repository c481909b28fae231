"""Who runs at a real-time priority: the supervisor always, the CPU's worker only while it stands by.

Priority decides how long a frame waits when the NPU fails. A CPU worker that serves for longer than a moment goes back
to normal, because at a real-time priority it would starve the rest of the board. Where the unit may not do this, the
service works all the same and says so.
"""

from __future__ import annotations

from inference.lane import Lane
from inference.processes import run_normal, run_real_time

# Between two faults the CPU stays ready to jump in.
_LINGER_S = 2.0


class Priorities:
    """The supervisor's and the standby's."""

    def __init__(self) -> None:
        self.description = "normal"
        self._standby_pid = 0
        self._npu_seen_at = float("-inf")

    def raise_own(self, priority: int) -> None:
        """Put this process at a real-time priority; 0 leaves it."""
        if priority:
            refused = run_real_time(0, priority)
            self.description = f"normal ({refused})" if refused else "fifo"

    def arrange(self, npu: Lane | None, cpu: Lane | None, now: float) -> None:
        """Give the CPU's worker what its part of the moment needs."""
        if npu is None or cpu is None or not cpu.order.fifo_priority:
            return
        if npu.serving:
            self._npu_seen_at = now
        standby_pid = 0
        if cpu.worker is not None and now - self._npu_seen_at < _LINGER_S:
            standby_pid = cpu.worker.pid
        if standby_pid == self._standby_pid:
            return
        if standby_pid:
            refused = run_real_time(standby_pid, cpu.order.fifo_priority)
            if refused:
                self.description = f"normal ({refused})"
        elif cpu.worker is not None:
            run_normal(cpu.worker.pid)
        self._standby_pid = standby_pid

"""How much of a deadline a worker had: time in which it stood ready and no CPU took it up is not the NPU's fault.

On a loaded board a healthy worker at normal priority can stand in the run queue for longer than a hard deadline. The
kernel keeps book of that in /proc/PID/schedstat (of the worker's main thread, which is the one that calls the runtime).
Where it does not, all time counts. A worker that spins runs, one that hangs in the driver sleeps: neither is excused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Share:
    """A process's account: seconds on a CPU, seconds in the queue, and whether it wants to run now."""

    ran_s: float
    queued_s: float
    runnable: bool


def share_of(pid: int) -> Share | None:
    """The account of a process; None where the kernel keeps none, or the process is gone."""
    try:
        ran, queued, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except (OSError, ValueError):
        return None
    return Share(int(ran) / 1e9, int(queued) / 1e9, state == "R")


def had_s(before: Share | None, after: Share | None, elapsed_s: float) -> float:
    """Seconds of `elapsed_s` that the process could use, asleep in a driver or on a CPU."""
    if before is None or after is None:
        return elapsed_s
    if after.runnable:
        # The wait that still goes on is in no account yet; what it ran is certain.
        return min(elapsed_s, after.ran_s - before.ran_s)
    return min(elapsed_s, max(0.0, elapsed_s - (after.queued_s - before.queued_s)))

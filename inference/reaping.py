"""Workers that were killed and are not dead yet. Nothing here waits: a death is a readable descriptor.

The next worker waits for the last one killed; a process stuck in the kernel may outlive that wait by hours.
"""

from __future__ import annotations

from inference.processes import WorkerProcess


class Reaper:
    """One lane's dying workers."""

    def __init__(self) -> None:
        self._dying: list[WorkerProcess] = []
        self._awaited: WorkerProcess | None = None

    def kill(self, worker: WorkerProcess, now: float) -> None:
        """End a worker and await its death."""
        worker.kill(now)
        self._dying.append(worker)
        self._awaited = worker

    def descriptors(self) -> list[int]:
        """What becomes readable at a death."""
        return [worker.pidfd for worker in self._dying]

    def pids(self) -> list[int]:
        """Who is not dead yet."""
        return [worker.pid for worker in self._dying]

    def overdue_at(self, patience_s: float) -> float | None:
        """When the awaited worker counts as one that will not die."""
        return None if self._awaited is None else self._awaited.killed_at + patience_s

    def collect(self) -> list[tuple[int, str, bool]]:
        """Who has died since: pid, how it ended, and whether it was the awaited one."""
        collected = []
        for worker in list(self._dying):
            ended = worker.reap()
            if ended is None:
                continue
            self._dying.remove(worker)
            collected.append((worker.pid, ended, worker is self._awaited))
            if worker is self._awaited:
                self._awaited = None
        return collected

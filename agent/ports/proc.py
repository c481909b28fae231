"""What /proc says of the processes of this board, without ever waiting for one of them.

A process's memory map is read under a lock of that process, and one that hangs in the kernel may hang holding it. So
maps are read in a thread that is left behind at a deadline; the wait in it ends with the process or with the agent
(mmap_read_lock_killable, fs/proc/task_mmu.c). A process that is left behind is not asked again before it has answered.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from agent.ports.protocols import Process

PROC = Path("/proc")
PATIENCE_S = 1.0  # for one process; a large map takes milliseconds

Mapped = frozenset[str] | PermissionError | None  # None: it could not be read in time
_Answers = queue.SimpleQueue[Mapped | ProcessLookupError]


def pids(proc: Path = PROC) -> list[int]:
    """Every process, oldest number first."""
    return sorted(int(name) for name in os.listdir(proc) if name.isdigit())  # noqa: PTH208


class MapReader:
    """Reads which files processes have mapped."""

    def __init__(self, proc: Path = PROC, patience_s: float = PATIENCE_S) -> None:
        self._proc = proc
        self._patience_s = patience_s
        self._late: dict[int, threading.Thread] = {}

    def read(self, numbers: Iterable[int]) -> dict[int, Mapped]:
        """What each process has mapped; one that has ended is left out."""
        self._late = {pid: thread for pid, thread in self._late.items() if thread.is_alive()}
        numbers = list(numbers)
        found: dict[int, Mapped] = {pid: None for pid in numbers if pid in self._late}
        waiting = deque(pid for pid in numbers if pid not in self._late)
        while waiting:
            self._read_until_late(waiting, found)
        return found

    def _read_until_late(self, waiting: deque[int], found: dict[int, Mapped]) -> None:
        answers: _Answers = queue.SimpleQueue()
        left_behind = threading.Event()
        reader = threading.Thread(
            target=_read_all, args=(self._proc, tuple(waiting), answers, left_behind), name="maps", daemon=True
        )
        reader.start()
        while waiting:
            pid = waiting.popleft()
            try:
                answer = answers.get(timeout=self._patience_s)
            except queue.Empty:
                left_behind.set()
                self._late[pid] = reader
                found[pid] = None
                return
            if not isinstance(answer, ProcessLookupError):
                found[pid] = answer


def _read_all(proc: Path, numbers: Sequence[int], answers: _Answers, left_behind: threading.Event) -> None:
    for pid in numbers:
        answers.put(_read(proc / str(pid) / "maps"))
        if left_behind.is_set():
            return


def _read(path: Path) -> Mapped | ProcessLookupError:
    try:
        with path.open(encoding="utf-8", errors="surrogateescape") as maps:
            fields = (line.rstrip("\n").split(maxsplit=5) for line in maps)
            return frozenset(found[5] for found in fields if len(found) == 6)
    except PermissionError as cause:
        return cause
    except OSError:  # it ended meanwhile
        return ProcessLookupError()


def describe(pid: int, proc: Path = PROC) -> Process:
    """Who this is. Raises FileNotFoundError or ProcessLookupError when it has ended."""
    process = proc / str(pid)
    try:
        wchan = (process / "wchan").read_text(errors="replace").strip()
    except PermissionError:
        wchan = ""
    # The command's name stands in brackets and may hold any character, brackets too.
    state = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return Process(
        pid=pid,
        comm=(process / "comm").read_text(errors="replace").strip(),
        state=state,
        wchan="" if wchan == "0" else wchan,
        unit=unit_of((process / "cgroup").read_text(errors="replace")),
    )


def unit_of(cgroup: str) -> str:
    """The system's unit that a process belongs to; below it, a container's or a user's manager has units of its own."""
    for line in cgroup.splitlines():
        hierarchy, _, rest = line.partition(":")
        path = rest.partition(":")[2]
        if hierarchy != "0" and "name=systemd" not in rest:
            continue
        for part in path.split("/"):
            if part.endswith((".service", ".scope")):
                return part
    return ""

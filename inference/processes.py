"""Processes below the service: how each is started, watched, ended, and made to die with its parent.

Every process here asks the kernel to be killed when its parent dies, and checks afterwards that the parent had not
died before it asked. A child gets its parent's module path as an argument, because launchers on the board run with
`-I`, which ignores PYTHONPATH. Workers are forked by the zygote and inherited by the supervisor, which is their
subreaper: so the supervisor gets their exit status, and its death is theirs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from dataclasses import dataclass, field

from inference.records import Token

_libc = ctypes.CDLL(None, use_errno=True)
_ADOPTION_S = 5.0
_PR_SET_PDEATHSIG = 1
_PR_SET_TIMERSLACK = 29
_PR_SET_CHILD_SUBREAPER = 36


def python_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs `module.main(arguments)` in a fresh interpreter with this one's module path."""
    path = [entry for entry in sys.path if entry]
    code = f"import sys; sys.path[:] = {path!r}; from {module} import main; main(sys.argv[1:])"
    flags = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]
    return [sys.executable, *flags, "-c", code, *arguments]


def die_with_parent(parent_pid: int, *, born_of: int | None = None) -> None:
    """Be killed when process `parent_pid` dies; exit now if it is dead already.

    `born_of` is for a worker, which becomes the supervisor's child only when the process between them has gone.
    """
    deadline = time.monotonic() + _ADOPTION_S
    while os.getppid() == born_of and time.monotonic() < deadline:
        time.sleep(0.0002)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent, below this one, dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def ignore_stop_signals() -> None:
    """Leave Ctrl-C and systemd's SIGTERM, which reach the whole unit, to the service; everything ends when it does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def sharpen_timers() -> None:
    """Let timeouts fire on time instead of up to 50 us later."""
    _prctl(_PR_SET_TIMERSLACK, 1)


def run_real_time(pid: int, priority: int) -> str:
    """Put a process (0: this one) under SCHED_FIFO; empty, or why it was refused, which is not fatal."""
    try:
        # Children start at normal priority: a vendor library that spins at a real-time one would take the board along.
        os.sched_setscheduler(pid, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def run_normal(pid: int) -> None:
    """Put a process back under normal scheduling; one that has died needs none."""
    try:
        os.sched_setscheduler(pid, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
    except (ProcessLookupError, PermissionError):
        return


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


@dataclass(slots=True)
class Pipes:
    """Two packet pipes of one worker generation: ours to write tokens and read answers, and the worker's ends."""

    tokens_out: int
    answers_in: int
    tokens_in: int
    answers_out: int

    @classmethod
    def open(cls) -> Pipes:
        """New pipes; our ends never block."""
        tokens_in, tokens_out = os.pipe2(os.O_CLOEXEC | os.O_DIRECT)
        answers_in, answers_out = os.pipe2(os.O_CLOEXEC | os.O_DIRECT)
        os.set_blocking(tokens_out, False)
        os.set_blocking(answers_in, False)
        return cls(tokens_out, answers_in, tokens_in, answers_out)

    def close_worker_ends(self) -> None:
        """After they were sent to the zygote: the worker's death must close the last writer."""
        os.close(self.tokens_in)
        os.close(self.answers_out)

    def close_our_ends(self) -> None:
        """When the worker is dead."""
        os.close(self.tokens_out)
        os.close(self.answers_in)


@dataclass(slots=True)
class WorkerProcess:
    """A forked worker of one generation, from the supervisor's side. `hung_up` once its answer pipe is at its end."""

    generation: int
    pid: int
    pidfd: int
    pipes: Pipes
    hung_up: bool = False
    killed_at: float = field(default=0.0)

    def send(self, token: Token) -> bool:
        """Write a token; False when the worker is gone or has stopped reading."""
        try:
            os.write(self.pipes.tokens_out, token.pack())
        except (BrokenPipeError, BlockingIOError):
            return False
        return True

    def kill(self, now: float) -> None:
        """Send SIGKILL; returns at once, whatever the worker is doing."""
        self.killed_at = self.killed_at or now
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return

    def reap(self) -> str | None:
        """How it ended ("SIGSEGV", "status 1"), closing everything of it; None while it lives. Never waits."""
        try:
            status = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            ended = "unknown"
        else:
            if status is None:
                return None
            exited = status.si_code == os.CLD_EXITED
            ended = f"status {status.si_status}" if exited else signal.Signals(status.si_status).name
        os.close(self.pidfd)
        self.pipes.close_our_ends()
        return ended

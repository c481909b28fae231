"""The supervisor's hand on the zygote: requests for workers go out, pids come back, a dead zygote is replaced.

Requests do not wait for replies, because a fork takes longer than a frame may. A zygote that died, for instance while
it imported the runtime, is started again at the next request, without preloading: then the import kills the worker
that needs it, and the reason is told.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.policy import Backend
from inference.processes import Pipes, python_command
from inference.records import NOTE_LIMIT, pack_note, unpack_note


@dataclass(frozen=True, slots=True)
class Launched:
    """A worker was forked; pid 0 means that it could not be."""

    backend: Backend
    generation: int
    pid: int


class Launcher:
    """One zygote at a time."""

    def __init__(self, frames_fd: int) -> None:
        self._frames_fd = frames_fd
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._ended: list[subprocess.Popen[bytes]] = []
        self._strays: set[int] = set()
        self._preload = "preload"

    def descriptors(self) -> list[int]:
        """What to wait on."""
        return [self._channel.fileno()] if self._channel is not None else []

    def launch(self, backend: Backend, generation: int, order: Mapping[str, Any], pipes: Pipes) -> bool:
        """Ask for a worker and give its pipe ends away; False when the zygote cannot be asked."""
        if self._channel is None:
            self._channel = self._spawn()
        request = pack_note({"backend": backend, "generation": generation, "order": order})
        try:
            socket.send_fds(self._channel, [request], [self._frames_fd, pipes.tokens_in, pipes.answers_out])
        except (BrokenPipeError, ConnectionResetError, BlockingIOError):
            return False
        finally:
            pipes.close_worker_ends()
        return True

    def replies(self) -> list[Launched] | None:
        """The replies that have come; None when the zygote is dead and its requests are lost."""
        if self._channel is None:
            return []
        try:
            raw = self._channel.recv(NOTE_LIMIT)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            raw = b""
        if not raw:
            self.kill()
            self._channel.close()
            self._channel = None
            if self._process is not None:
                self._ended.append(self._process)
            self._process = None
            self._preload = "bare"
            return None
        note = unpack_note(raw)
        return [Launched(Backend(note["backend"]), note["generation"], note["pid"])]

    def kill(self) -> None:
        """End the zygote; its workers are the supervisor's children and live on."""
        if self._process is not None:
            self._process.kill()

    def kill_strays(self, known: Iterable[int]) -> None:
        """After a zygote died between fork and reply: end workers nobody was told of, so that none holds the NPU."""
        mine = os.getpid()
        try:
            children = Path(f"/proc/{mine}/task/{mine}/children").read_text()
        except OSError:
            # A kernel without CONFIG_PROC_CHILDREN: such a worker ends by itself, its pipes have no other end.
            return
        spared = {*known, *(process.pid for process in self._ended)}
        for pid in {int(word) for word in children.split()} - spared:
            os.kill(pid, signal.SIGKILL)
            self._strays.add(pid)

    def reap(self) -> None:
        """Collect zygotes and strays that have ended. Never waits."""
        self._ended = [process for process in self._ended if process.poll() is None]
        self._strays = {pid for pid in self._strays if os.waitpid(pid, os.WNOHANG) == (0, 0)}

    def _spawn(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                python_command("inference.zygote", str(theirs.fileno()), str(os.getpid()), self._preload),
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                # One thread: a fork of a process with more would inherit locks that nobody will ever release.
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        ours.setblocking(False)
        return ours

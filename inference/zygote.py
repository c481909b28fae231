"""The process that has the runtime imported and forks workers from it, in milliseconds instead of hundreds.

It never loads a delegate and never opens a model, so no hung library and no damaged file can reach it. It forks twice:
the worker becomes the supervisor's child, which is its subreaper, and dies with it. Requests and replies are notes over
a SEQPACKET socket, with the worker's descriptors beside them. It is single-threaded and ends when its socket does.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from inference.errors import InferenceError
from inference.policy import Reason
from inference.processes import die_with_parent, ignore_stop_signals
from inference.records import NOTE_LIMIT, pack_note, unpack_note


def main(arguments: Sequence[str]) -> None:
    """`arguments`: the socket's descriptor, the supervisor's pid, and `preload` or `bare`."""
    descriptor, supervisor_pid, preload = int(arguments[0]), int(arguments[1]), arguments[2]
    die_with_parent(supervisor_pid)
    ignore_stop_signals()
    channel = socket.socket(fileno=descriptor)
    if preload == "preload":
        _preload()
    gc.collect()
    gc.freeze()
    while True:
        raw, descriptors, _, _ = socket.recv_fds(channel, NOTE_LIMIT, 8)
        if not raw:
            return
        request = unpack_note(raw)
        pid = _fork_worker(request, descriptors, channel, supervisor_pid)
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(pack_note({"backend": request["backend"], "generation": request["generation"], "pid": pid}))


def _preload() -> None:
    # A runtime that cannot be imported is reported by the worker that needs it.
    try:
        import inference.model_schema
        import inference.worker  # noqa: F401
    except ImportError:
        return


def _fork_worker(
    request: Mapping[str, Any], descriptors: Sequence[int], channel: socket.socket, supervisor_pid: int
) -> int:
    """The worker's pid, or 0 when the machine has no room for another process."""
    pid_in, pid_out = os.pipe()
    try:
        between = os.fork()
    except OSError:
        os.close(pid_in)
        os.close(pid_out)
        return 0
    if between == 0:
        try:
            born_of = os.getpid()
            worker = os.fork()
            if worker == 0:
                channel.close()
                os.close(pid_in)
                os.close(pid_out)
                _become_worker(request, descriptors, supervisor_pid, born_of)
            os.write(pid_out, str(worker).encode())
        finally:
            os._exit(0)
    os.close(pid_out)
    pid = int(os.read(pid_in, 32) or 0)
    os.close(pid_in)
    os.waitpid(between, 0)
    return pid


def _become_worker(request: Mapping[str, Any], descriptors: Sequence[int], supervisor_pid: int, born_of: int) -> None:
    status = 1
    try:
        die_with_parent(supervisor_pid, born_of=born_of)
        frames_fd, tokens_in, answers_out = descriptors
        _serve(request, frames_fd, tokens_in, answers_out)
        status = 0
    except BrokenPipeError:
        # The supervisor has closed this generation's pipes.
        status = 0
    except Exception:  # noqa: BLE001 - a process boundary: this stack must never return into the zygote's loop
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _serve(request: Mapping[str, Any], frames_fd: int, tokens_in: int, answers_out: int) -> None:
    try:
        from inference import worker
    except ImportError as error:
        cause = InferenceError(
            f"cannot import an inference runtime: {error}", "install ai-edge-litert, or the board's tflite_runtime"
        )
        note = {"stage": "failed", "reason": Reason.REFUSED, "permanent": True}
        os.write(answers_out, pack_note({**note, "message": cause.message, "remedy": cause.remedy}))
        return
    worker.serve(request["order"], frames_fd, tokens_in, answers_out)

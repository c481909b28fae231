"""The program of avocado-warm-up.service: tries the model of a set of extensions that nobody else sees.

Started through PID 1 by ports/rehearsal.py with a request, JSON in base64, as its argument; it prints one JSON object:
`status`, `stdout` and `stderr` of `avocado-infer try`, `skipped` with what kept it from running, or `error`. The set is
built in a mount namespace of this process's own, out of images that are checked as for a switch; then it becomes the
pose service's user for good and runs the set's own program, with the service's cache. Whatever happens, the namespace
and everything mounted in it end with the process.
"""

from __future__ import annotations

import base64
import contextlib
import grp
import json
import os
import pwd
import sys
from pathlib import Path
from typing import Any

from agent.contract.errors import OperationError
from agent.ports import mounts, unit_files
from agent.ports.image_child import said
from agent.ports.overlay_child import show_here
from agent.ports.process import run

PROGRAM = "/usr/bin/avocado-infer"
_MAX_STDOUT_BYTES = 1 << 16
_MAX_STDERR_BYTES = 1 << 13


def main(argv: list[str]) -> int:
    """Do what the request says and print how it went."""
    request = json.loads(base64.b64decode(argv[-1]))
    try:
        _give_way()
        show_here(request)
        mounts.mount("tmpfs", "/tmp", "tmpfs", mounts.MS_NOSUID | mounts.MS_NODEV, "mode=1777")  # noqa: S108
        answer = stale(request) or _try_as(request)
    except OperationError as error:
        answer = {"error": error.as_dict()}
    except OSError as cause:
        answer = {"skipped": f"the new set cannot be shown to it alone: {said(cause)}"}
    json.dump(answer, sys.stdout)
    return 0


def _give_way() -> None:
    """Nice= of the unit counts within its session only, where the kernel groups sessions."""
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19", encoding="ascii")


def stale(request: dict[str, Any], root: str = "") -> dict[str, Any] | None:
    """User, groups and environment are those of another service than the set's: then its model is not judged."""
    if unit_files.to_be_read(request["unit"], root) == request["unit_files"]:
        return None
    return {"skipped": f"the set changes {request['unit']} itself, which systemd has not read yet"}


def _try_as(request: dict[str, Any]) -> dict[str, Any]:
    try:
        user = pwd.getpwnam(request["user"])
        groups = {user.pw_gid, *(grp.getgrnam(name).gr_gid for name in request["groups"])}
    except KeyError as missing:
        return {"skipped": f"the new set does not know the pose service's user or group: {missing.args[0]}"}
    groups |= set(os.getgrouplist(user.pw_name, user.pw_gid))
    if user.pw_uid == 0:
        return {"skipped": "the pose service runs as root, which no untried model should"}
    os.setgroups(sorted(groups))
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    return tried(request)


def tried(request: dict[str, Any], program: str = PROGRAM) -> dict[str, Any]:
    """How the program took it."""
    if not os.access(program, os.X_OK):
        return {"skipped": f"the new set has no {program}"}
    os.environ.clear()
    os.environ.update(request["env"])
    words = ["try", "-o", "json", *request["words"]]
    finished = run([program, *words], request["timeout_s"])
    stderr = finished.stderr[-_MAX_STDERR_BYTES:].decode(errors="replace")
    print(stderr, end="", file=sys.stderr)  # the unit's journal
    stdout = finished.stdout[:_MAX_STDOUT_BYTES].decode(errors="replace")
    return {"status": finished.status, "stdout": stdout, "stderr": stderr}

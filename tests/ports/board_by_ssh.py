"""An `ssh` on PATH that runs the board's commands here and fails on demand, and a repository to serve over it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from agent.contract.errors import OperationError
from agent.host import ssh

BLOB = bytes(range(256)) * 4096 * 2

# Drops ssh's options and the host, then runs the command in a shell, as sshd does; CASE says how it goes wrong.
SSH = """\
#!/bin/bash
while [ $# -gt 0 ]; do case $1 in -o) shift 2;; -*) shift;; *) break;; esac; done
shift; [ "${1:-}" = -- ] && shift
echo "$*" >>"$BRIDGE_LOG"
case ${CASE:-none} in
    before) echo 'PATH is set.'; printf '\\033[90m[ OK ]\\033[0m \\0\\1\\377 welcome ';;
    json) echo '{"motd": "welcome"}';;
    endless) exec yes 'and on it goes';;
    slow) exec sleep 60;;
    restricted) echo 'This account is limited to git.'; exit 1;;
    notfound) exec env PATH=/nowhere /bin/sh -c "$*";;
    user) echo 'root@board: Permission denied (publickey).' >&2; exit 255;;
    hostkey) echo 'Host key verification failed.' >&2; exit 255;;
    dropped) [[ $* = *receive* ]] && exec timeout --signal=KILL 3 $*;;
    unreachable) echo 'ssh: connect to host board port 22: No route to host' >&2; exit 255;;
esac
[ "${CASE:-none}" = none ] && exec /bin/sh -c "$*"
/bin/sh -c "$*"; status=$?
case ${CASE:-none} in after) echo logout;; status) exit 255;; esac
exit $status
"""


def board_by_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The host's repository; and a board whose `ssh` and `avocadoctl` are first on PATH."""
    programs, run_dir, repository = tmp_path / "bin", tmp_path / "run", tmp_path / "repository"
    for made in (programs, run_dir, repository / "targets"):
        made.mkdir(parents=True)
    (repository / "targets/blob").write_bytes(BLOB)
    (tmp_path / "secret").write_text("secret")
    (programs / "ssh").write_text(SSH)
    (programs / "avocadoctl").write_text(
        f'#!/bin/sh\nfor word; do [ "$word" = receive ] && set -- "$@" --run-dir {run_dir}; done\n'
        'for word; do [ "$word" = status -o "$word" = history ] && { cat "$BRIDGE_STATUS"; exit; }; done\n'
        f'exec {sys.executable} -m agent.cli "$@"\n'
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    (tmp_path / "status.json").write_text('{"target": "virtual"}')
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("BRIDGE_STATUS", str(tmp_path / "status.json"))
    monkeypatch.setenv("BRIDGE_LOG", str(tmp_path / "ssh.log"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(ssh, "HANDSHAKE_S", 5.0)
    monkeypatch.setattr(ssh, "_STATUS_S", 5.0)
    return repository


def refused(work: Coroutine[Any, Any, Any]) -> OperationError:
    with pytest.raises(OperationError) as caught:
        asyncio.run(work)
    return caught.value

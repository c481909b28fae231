"""The same verb on another board: `avocadoctl -H board VERB` through the user's own ssh, as `systemctl -H` does.

The user's ssh configuration, agent, jump hosts and host keys apply; nothing is guessed. Standard output, standard
error and the exit status are the board's; only ssh's own failures become errors of ours. A verb that may change /etc
comes back over a connection of its own when the board waits for that, or the board takes the change back.
"""

from __future__ import annotations

import re
import shlex
import sys
import threading
from collections.abc import Sequence

from agent.contract.errors import ErrorCode, OperationError
from agent.ports.process import pass_through, run

SSH_FAILED_STATUS = 255
NOT_FOUND_STATUS = 127
# Over a connection of its own, whatever the user's configuration shares.
AFRESH = ("-o", "ControlMaster=no", "-o", "ControlPath=none")
ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "ConnectTimeout=10")
_AWAITS = re.compile(rb"#([1-9][0-9]{0,8}) await_confirmation\s*")  # as client.step_teller says it
_CONFIRM_TIMEOUT_S = 30.0
_CONFIRM_EVERY_S = 2.0
_LOST_FOR_S = 70.0  # a board waits for a minute, unless its runtime says otherwise


def ssh_argv(host: str, argv: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """The command line that runs `argv` on `host`, whose shell splits it again. Raises `usage` for an odd host."""
    if not host or host.startswith("-"):
        raise OperationError(
            ErrorCode.USAGE, f"cannot use {host!r} as a host", "Give it as ssh takes it: -H root@board"
        )
    # -T: with a terminal the two output streams would become one.
    return ["ssh", "-T", *options, host, "--", shlex.join(argv)]


def run_there(host: str, words: Sequence[str], *, comes_back: bool = False) -> int:
    """Run avocadoctl with these words on the board and give its exit status.

    `comes_back`: it may be a change of /etc, which the board keeps only when this host reaches it anew.
    """
    returning = _Return(host) if comes_back else None
    argv = ssh_argv(host, ["avocadoctl", *words], ALIVE if comes_back else ())
    status = pass_through(argv, returning.hear if returning else None)
    number = returning.ended(lost=status == SSH_FAILED_STATUS) if returning else 0
    if status == SSH_FAILED_STATUS and number:
        raise OperationError(
            ErrorCode.SSH_FAILED,
            f"cannot follow change {number} on {host}: ssh failed",
            f"See how it ended: avocadoctl -H {host} history show {number}",
        )
    if status == SSH_FAILED_STATUS:
        raise OperationError(
            ErrorCode.SSH_FAILED, f"cannot reach {host}: ssh failed", f"Check that this works: ssh {host} true"
        )
    if status == NOT_FOUND_STATUS:
        raise OperationError(
            ErrorCode.AGENT_UNREACHABLE,
            f"cannot run avocadoctl on {host}: it is not installed there",
            "Provision the board: avocadoctl provision --help",
        )
    return status


class _Return:
    """Comes back to a board that waits for it."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._over = threading.Event()
        self._number = 0
        self._thread: threading.Thread | None = None

    def hear(self, line: bytes) -> None:
        """What the board's avocadoctl says while the change runs."""
        found = _AWAITS.fullmatch(line)
        if found and self._thread is None:
            self._number = int(found[1])
            self._thread = threading.Thread(target=self._confirm, daemon=True)
            self._thread.start()

    def ended(self, *, lost: bool) -> int:
        """The number of the change that waited, or 0. One whose connection was lost may wait still."""
        if self._thread is not None and lost and self._thread.is_alive():
            print(
                f"the connection to {self._host} was lost; trying to come back to change {self._number}",
                file=sys.stderr,
            )
            self._thread.join(_LOST_FOR_S)
        self._over.set()
        return self._number

    def _confirm(self) -> None:
        line = ssh_argv(self._host, ["avocadoctl", "confirm", str(self._number)], (*AFRESH, *ALIVE))
        while not self._over.is_set():
            try:
                if run(line, _CONFIRM_TIMEOUT_S).status == 0:
                    return
            except OperationError:
                pass  # it may be reached the next time; the board's own deadline decides
            self._over.wait(_CONFIRM_EVERY_S)

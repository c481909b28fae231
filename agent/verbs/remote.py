"""The same verb on another board: `avocadoctl -H board VERB` through the user's own ssh, as `systemctl -H` does.

The user's ssh configuration, agent, jump hosts and host keys apply; nothing is guessed. Standard output, standard
error and the exit status are the board's; only ssh's own failures become errors of ours. A verb that may change /etc
comes back over a connection of its own when the board waits for that, or the board takes the change back.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import threading
import time
from collections.abc import Sequence

from agent.contract.errors import ErrorCode, OperationError
from agent.ports.process import Finished, pass_through, run
from agent.verbs.show import tell_it_goes_on

SSH_FAILED_STATUS = 255
NOT_FOUND_STATUS = 127
# Over a connection of its own, whatever the user's configuration shares.
AFRESH = ("-o", "ControlMaster=no", "-o", "ControlPath=none")
ALIVE = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3", "-o", "ConnectTimeout=10")
_STEP = re.compile(rb"#([1-9][0-9]{0,8}) (?:undo )?([a-z_]+)\s*")  # as client.step_teller says it
_AWAITS = b"await_confirmation"
_CONFIRM_TIMEOUT_S = 30.0
_CONFIRM_EVERY_S = 2.0
_LOST_FOR_S = 70.0  # without a word from a board: it waits for a minute, unless its runtime says otherwise


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
    try:
        status = pass_through(argv, returning.hear if returning else None)
    except KeyboardInterrupt:
        if returning and returning.number:
            tell_it_goes_on(returning.number, host)
        raise
    lost = status == SSH_FAILED_STATUS or status < 0  # below 0: a signal ended ssh
    number = returning.ended(lost=lost) if returning else 0
    if lost and number:
        raise OperationError(
            ErrorCode.SSH_FAILED,
            f"cannot follow change {number} on {host}: {_how(status)}",
            f"See how it ended: avocadoctl -H {host} history show {number}",
        )
    if lost:
        raise OperationError(
            ErrorCode.SSH_FAILED, f"cannot reach {host}: {_how(status)}", f"Check that this works: ssh {host} true"
        )
    if status == NOT_FOUND_STATUS:
        raise OperationError(
            ErrorCode.AGENT_UNREACHABLE,
            f"cannot run avocadoctl on {host}: it is not installed there",
            "Provision the board: avocadoctl provision --help",
        )
    return status


def _how(status: int) -> str:
    return f"ssh was ended by signal {-status}" if status < 0 else "ssh failed"


class _Return:
    """Comes back to a board that waits for it, or that may: a link lost earlier does not tell."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._over = threading.Event()
        self.number = 0  # of the change that was heard of
        self._heard_s = 0.0
        self._thread: threading.Thread | None = None

    def hear(self, line: bytes) -> None:
        """What the board's avocadoctl says while the change runs."""
        if found := _STEP.fullmatch(line):
            self.number = int(found[1])
            if found[2] == _AWAITS:
                self._come_back()

    def ended(self, *, lost: bool) -> int:
        """The number of the change that was heard of, or 0. One whose connection was lost runs on, and may wait."""
        if lost and self.number:
            print(
                f"the connection to {self._host} was lost; change {self.number} still runs: trying to come back",
                file=sys.stderr,
            )
            self._heard_s = time.monotonic()
            returning = self._come_back()
            while returning.is_alive() and time.monotonic() - self._heard_s < _LOST_FOR_S:
                returning.join(_CONFIRM_EVERY_S)
        self._over.set()
        return self.number

    def _come_back(self) -> threading.Thread:
        if self._thread is None:
            self._thread = threading.Thread(target=self._confirm, daemon=True)
            self._thread.start()
        return self._thread

    def _confirm(self) -> None:
        number = str(self.number)
        while not self._over.is_set():
            try:
                status = self._ask("confirm", number).status
                if status == 0 or (status != SSH_FAILED_STATUS and self._has_ended(number)):
                    return
            except OperationError:
                pass  # it may be reached the next time; the board's own deadline decides
            self._over.wait(_CONFIRM_EVERY_S)

    def _has_ended(self, number: str) -> bool:
        record = self._ask("-o", "json", "history", "show", number)
        if record.status != 0:
            return False
        self._heard_s = time.monotonic()
        return bool(json.loads(record.stdout)["outcome"] != "running")

    def _ask(self, *words: str) -> Finished:
        return run(ssh_argv(self._host, ["avocadoctl", *words], (*AFRESH, *ALIVE)), _CONFIRM_TIMEOUT_S)

"""The same verb on another board: `avocadoctl -H board VERB` through the user's own ssh, as `systemctl -H` does.

The user's ssh configuration, agent, jump hosts and host keys apply; nothing is guessed. Standard output, standard
error and the exit status are the board's; only ssh's own failures become errors of ours.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from agent.contract.errors import ErrorCode, OperationError
from agent.ports.process import pass_through

SSH_FAILED_STATUS = 255
NOT_FOUND_STATUS = 127


def ssh_argv(host: str, argv: Sequence[str]) -> list[str]:
    """The command line that runs `argv` on `host`, whose shell splits it again. Raises `usage` for an odd host."""
    if not host or host.startswith("-"):
        raise OperationError(
            ErrorCode.USAGE, f"cannot use {host!r} as a host", "Give it as ssh takes it: -H root@board"
        )
    # -T: with a terminal the two output streams would become one.
    return ["ssh", "-T", host, "--", shlex.join(argv)]


def run_there(host: str, words: Sequence[str]) -> int:
    """Run avocadoctl with these words on the board and give its exit status."""
    status = pass_through(ssh_argv(host, ["avocadoctl", *words]))
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

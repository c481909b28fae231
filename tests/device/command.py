"""The command line of the virtual board: up, ssh, exec, status, forward, power-cut, down.

`up` leaves the board running behind it and says how to reach it. Progress is for terminals only, so in a pipe there is
nothing but the answer.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from tests.device.board import TREE, Board
from tests.device.host import locked
from tests.device.process import BoardError
from tests.device.progress import step

NOT_RUNNING = 3


def main() -> int:
    """Run one verb; the exit status is the program's own for `ssh` and `exec`."""
    options = _parser().parse_args()
    try:
        status: int = options.verb(options)
        return status
    except BoardError as error:
        print(f"board: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _up(options: argparse.Namespace) -> int:
    with locked(TREE / f"build/board/.{options.name}.lock"):  # against a second `make board` beside this one
        return _up_alone(options)


def _up_alone(options: argparse.Namespace) -> int:
    board = Board.find(options.name)
    if board is not None and board.is_running():
        print(f"{board.name} is up already")
        return _tell_how_to_reach(board)
    if board is None:
        board = Board.create(options.name)
    try:
        with step("booting"):
            state = board.boot()
    except BaseException:
        if board.slot.record() is not None:
            board.destroy()
        raise
    board.keep()
    print(f"{board.name} is up ({state})")
    return _tell_how_to_reach(board)


def _tell_how_to_reach(board: Board) -> int:
    print(f"  a shell on it:     make board-ssh    or    {' '.join(board.ssh_command())}")
    print(f'  ssh, avocadoctl:   PATH={board.access.programs}:"$PATH" ssh root@board')
    print("  take it away:      make board-down")
    return 0


def _ssh(options: argparse.Namespace) -> int:
    board = _running(options.name)
    line = [*board.ssh_command(options.user), *options.command]
    sys.stdout.flush()
    os.execv(line[0], line)


def _exec(options: argparse.Namespace) -> int:
    done = _running(options.name).exec(options.command, timeout_s=options.timeout, check=False)
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


def _status(options: argparse.Namespace) -> int:
    board = Board.find(options.name)
    if board is None or not board.is_running():
        print(f"{options.name} is {'absent' if board is None else 'off'}")
        return NOT_RUNNING
    print(f"{board.name} is up at {board.slot.network.board_address}")
    return _tell_how_to_reach(board)


def _forward(options: argparse.Namespace) -> int:
    with _running(options.name).forward(options.port, host_port=options.local) as way:
        print(f"{way.url} is port {options.port} of the board; Ctrl-C ends it", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 0


def _power_cut(options: argparse.Namespace) -> int:
    _running(options.name).power_cut()
    print(f"{options.name} lost its power; `make board` boots it again")
    return 0


def _down(options: argparse.Namespace) -> int:
    board = Board.find(options.name)
    if board is None:
        print(f"{options.name} is not there")
        return 0
    with step("taking the board away"):
        board.destroy()
    print(f"{options.name} is gone")
    return 0


def _running(name: str) -> Board:
    board = Board.find(name)
    if board is None or not board.is_running():
        raise BoardError(f"board {name} is not running; `make board` boots it")
    return board


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m tests.device.board", description=__doc__)
    parser.add_argument("--name", default="board", help="which board of this work tree (default: %(default)s)")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    verbs.add_parser("up", help="build what is missing, and boot").set_defaults(verb=_up)
    ssh = verbs.add_parser("ssh", help="a shell on the board, or one command")
    ssh.add_argument("--user", default="root")
    ssh.add_argument("command", nargs=argparse.REMAINDER)
    ssh.set_defaults(verb=_ssh)
    inside = verbs.add_parser("exec", help="run a program on the board as root, without ssh")
    inside.add_argument("--timeout", type=float, default=60, metavar="SECONDS")
    inside.add_argument("command", nargs=argparse.REMAINDER)
    inside.set_defaults(verb=_exec)
    verbs.add_parser("status", help=f"is it up? exit status {NOT_RUNNING} when not").set_defaults(verb=_status)
    forward = verbs.add_parser("forward", help="bring a port of the board to 127.0.0.1 of this host")
    forward.add_argument("port", type=int)
    forward.add_argument("local", type=int, nargs="?", default=0)
    forward.set_defaults(verb=_forward)
    verbs.add_parser("power-cut", help="lose what is not synced, and stay off").set_defaults(verb=_power_cut)
    verbs.add_parser("down", help="stop it and take everything it made away").set_defaults(verb=_down)
    return parser

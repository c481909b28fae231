"""avocadoctl: a verb becomes one answer from the board's status file, one bus call, or one action on the host.

Only the module of the verb that was typed is imported: `status` answers in the time Python takes to start, and a board
does without what only a host needs. Data goes to stdout and everything else to stderr; every failure is one message,
what to type next, and an exit status from the error table.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from agent.contract.errors import ErrorCode, OperationError, printable

EXAMPLES = """\
examples:
  avocadoctl status                                   what runs on this board
  avocadoctl -H root@board status                     the same, from the host, through ssh
  avocadoctl -H root@board -o json status | jq .inference.backend
  avocadoctl -H root@board deploy                     build, sign and change the board's runtime
  avocadoctl -H root@board rollback                   back to the runtime before

`avocadoctl VERB --help` explains each verb. Exit status: 0, or the one of the error (docs/operations.md)."""


INTERRUPTED_STATUS = 130  # as a shell reports SIGINT


class Verb(NamedTuple):
    """Where a verb lives. One with `on_board` runs on the board that -H names; the others are the host's own."""

    module: str
    summary: str
    on_board: bool


VERBS = {
    "status": Verb("agent.verbs.status", "runtime, extensions, services, backend, last change, problems", True),
    "ext": Verb("agent.verbs.ext", "extensions: list, status, enable, disable, merge, unmerge, refresh", True),
    "merge": Verb("agent.verbs.ext", "merge the active runtime's extensions", True),
    "unmerge": Verb("agent.verbs.ext", "unmerge every extension until the next boot or merge", True),
    "refresh": Verb("agent.verbs.ext", "make the running set what the active runtime names", True),
    "runtime": Verb("agent.verbs.runtime", "runtimes: list, inspect, add, activate, remove", True),
    "rollback": Verb("agent.verbs.runtime", "back to the previous runtime, or to a named one", True),
    "update": Verb("agent.verbs.update", "fetch what the configured repository has newer", True),
    "history": Verb("agent.verbs.history", "the changes of this board, and one of them in full", True),
    "confirm": Verb("agent.verbs.confirm", "keep a change of /etc that waits for somebody to come back", True),
    "cancel": Verb("agent.verbs.confirm", "end a running change before its switch", True),
    "watch": Verb("agent.verbs.history", "follow the running change", True),
    "verify": Verb("agent.verbs.verify", "hash every image on this board again", True),
    "root-authority": Verb("agent.verbs.root_authority", "the keys this board trusts, and until when", True),
    "receive": Verb("agent.receive", "the board's end of a deploy; run by deploy itself", True),
    "init": Verb("agent.host.verbs", "start a project: avocado.yaml", False),
    "install": Verb("agent.host.verbs", "fetch and check everything a build needs", False),
    "build": Verb("agent.host.verbs", "build the extensions of avocado.yaml", False),
    "keys": Verb("agent.host.verbs", "make and keep the signing keys", False),
    "publish": Verb("agent.host.verbs", "a signed repository in a folder", False),
    "provision": Verb("agent.host.verbs", "put the first runtime into a root file system", False),
    "deploy": Verb("agent.host.verbs", "change a board's runtime over ssh", False),
    "delta": Verb("agent.delta.verbs", "deltas: create, apply, info", False),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb named on the command line and give the exit status."""
    # The three global options are taken out first, since people write them before and after the verb.
    everywhere, words = _global_options(add_help=False).parse_known_args(sys.argv[1:] if argv is None else argv)
    typed = next((word for word in words if not word.startswith("-")), "")
    args = _parser(typed).parse_args(words, namespace=everywhere)
    try:
        if args.host and VERBS[typed].on_board:
            return _run_there(args, words)
        try:
            status: int = args.run(args)
        finally:
            _deliver()
    except OperationError as error:
        print_error(error, as_json=args.output == "json")
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    except BrokenPipeError:  # `avocadoctl history | head`
        sys.stderr.close()
        return 0
    return status


def _deliver() -> None:
    """What was printed has arrived: nobody may take a success for one whose document is lost."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as cause:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        code = ErrorCode.NO_SPACE if cause.errno == errno.ENOSPC else ErrorCode.INTERNAL
        raise OperationError(
            code, f"cannot write to standard output: {cause.strerror}", "Send it somewhere else; the rest is done."
        ) from cause


def _global_options(*, add_help: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="avocadoctl",
        description="See and change what runs on a board with an NPU.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=add_help,
        allow_abbrev=False,
    )
    # Suppressed defaults: the second parser must not overwrite what the first one found.
    default = argparse.SUPPRESS if add_help else None
    parser.add_argument("-H", "--host", metavar="[USER@]HOST", default=default, help="the board, as ssh knows it")
    parser.add_argument(
        "-o", "--output", choices=("table", "json"), default=default or "table", help="for people or for machines"
    )
    parser.add_argument("-v", "--verbose", action="store_true", default=default or False, help="say more on stderr")
    return parser


def _parser(typed: str) -> argparse.ArgumentParser:
    parser = _global_options(add_help=True)
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    if typed in VERBS:
        _import(typed).register(subparsers)
    for name, verb in VERBS.items():
        if name not in subparsers.choices:
            subparsers.add_parser(name, help=verb.summary)
    return parser


def _import(verb: str) -> Any:
    try:
        return importlib.import_module(VERBS[verb].module)
    except ModuleNotFoundError as cause:
        if VERBS[verb].on_board:
            raise
        error = OperationError(
            ErrorCode.UNSUPPORTED,
            f"cannot {verb} here: {cause.name} is not installed, and a board does not carry the host's half",
            "Run it on the host, where the project is.",
        )
        print_error(error, as_json=False)
        sys.exit(error.exit_status)


def _run_there(args: argparse.Namespace, words: list[str]) -> int:
    from agent.verbs.remote import run_there  # only -H needs it

    options = ["-o", args.output] if args.output != "table" else []
    options += ["-v"] if args.verbose else []
    comes_back = hasattr(args, "await_host")  # the verb may change /etc
    return run_there(args.host, [*options, *words, *(["--await-host"] if comes_back else [])], comes_back=comes_back)


def print_error(error: OperationError, *, as_json: bool) -> None:
    """The error on stderr: two lines for people, or its four fields as JSON."""
    if as_json:
        json.dump(error.as_dict(), sys.stderr)
        sys.stderr.write("\n")
        return
    print(f"avocadoctl: {printable(error.message)}", file=sys.stderr)
    if error.remedy:
        print(f"  try: {printable(error.remedy)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

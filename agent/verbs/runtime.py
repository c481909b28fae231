"""avocadoctl runtime and rollback: the runtimes on this board, and which of them runs.

A runtime may be named by the first characters of its id. Activating one is a change: the services concerned stop, the
set is switched, health is proven, and only then does the next boot use it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.status import RuntimeEntry, StatusDocument, read_status
from agent.verbs.options import add_await_host, add_dry_run, add_warm_up
from agent.verbs.show import print_json, table
from agent.verbs.status import run_dir

STATE_DIR = Path("/var/lib/avocado")

EXAMPLES = """\
examples:
  avocadoctl runtime list
  avocadoctl runtime inspect 3f2a
  avocadoctl runtime activate 3f2a
  avocadoctl runtime activate 3f2a --warm-up
  avocadoctl runtime add --url https://updates.example.org/boards/virtual"""


def register(subparsers: Any) -> None:
    """Add both verbs."""
    parser = subparsers.add_parser(
        "runtime",
        help="runtimes: list, inspect, add, activate, remove",
        description="See and change the runtimes of this board. An ID may be shortened.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="every runtime on disk").set_defaults(run=run_list)
    for name, summary, run in (
        ("inspect", "a runtime's signed manifest", run_inspect),
        ("activate", "change the board to a runtime on disk", run_activate),
        ("remove", "delete a runtime that is neither active nor needed", run_remove),
    ):
        action = actions.add_parser(name, help=summary)
        action.add_argument("id", metavar="ID")
        action.set_defaults(run=run)
        if name == "activate":
            add_dry_run(action)
            add_await_host(action)
            add_warm_up(action)
    add = actions.add_parser("add", help="fetch a signed runtime from a repository and change the board to it")
    add.add_argument("--url", required=True, help="http:// or https:// address of the repository")
    add.set_defaults(run=run_add)
    add_dry_run(add)
    add_warm_up(add)
    rollback = subparsers.add_parser(
        "rollback",
        help="back to the previous runtime, or to a named one",
        description="Change the board back to a runtime it has already run.",
        epilog="examples:\n  avocadoctl rollback\n  avocadoctl rollback 3f2a",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rollback.add_argument("id", metavar="ID", nargs="?", default="", help="default: the previous runtime")
    rollback.set_defaults(run=run_rollback)
    add_dry_run(rollback)
    add_await_host(rollback)
    add_warm_up(rollback)


def run_list(args: argparse.Namespace) -> int:
    """Print every runtime."""
    document = read_status(run_dir())
    if args.output == "json":
        print_json(document["runtimes"])
        return 0
    marks = {entry["id"]: mark for mark in ("previous", "runtime") if (entry := _named(document, mark))}
    rows = [
        (entry["name"], entry["version"], entry["id"], entry["built_at"], _MARKS.get(marks.get(entry["id"], ""), "-"))
        for entry in document["runtimes"]
    ]
    print(table(("RUNTIME", "VERSION", "ID", "BUILT", "USE"), rows))
    return 0


_MARKS = {"runtime": "active", "previous": "previous"}


def _named(document: StatusDocument, key: str) -> RuntimeEntry | None:
    return document["runtime"] if key == "runtime" else document["previous"]


def run_inspect(args: argparse.Namespace) -> int:
    """Print a runtime's manifest; it is JSON in both forms, being the document that was signed."""
    runtime = resolve(read_status(run_dir()), args.id)
    path = STATE_DIR / "runtimes" / runtime / "manifest.json"
    try:
        print_json(json.loads(path.read_bytes()))
    except PermissionError as cause:
        raise OperationError(ErrorCode.NOT_PERMITTED, f"cannot read {path}", "Run it as root.") from cause
    except (FileNotFoundError, ValueError) as cause:
        raise OperationError(ErrorCode.NOT_FOUND, f"cannot read {path}: {cause}") from cause
    return 0


def run_activate(args: argparse.Namespace) -> int:
    """Activate, and follow the change."""
    return _change("Activate", resolve(read_status(run_dir()), args.id), args)


def run_rollback(args: argparse.Namespace) -> int:
    """Roll back, and follow the change."""
    runtime = resolve(read_status(run_dir()), args.id) if args.id else ""
    return _change("Rollback", runtime, args)


def run_add(args: argparse.Namespace) -> int:
    """Deploy from a repository, and follow the change."""
    return _change("Deploy", args.url, args)


def _change(member: str, what: str, args: argparse.Namespace) -> int:
    from agent.verbs.client import options_for, run_change  # the bus library, which listing does not need

    asked = {name: getattr(args, name, False) for name in ("dry_run", "await_host")}
    options = options_for(warm_up=args.warm_up, **asked)
    return run_change(member, "sa{sv}", [what, options], as_json=args.output == "json")


def run_remove(args: argparse.Namespace) -> int:
    """Delete a runtime."""
    runtime = resolve(read_status(run_dir()), args.id)
    asyncio.run(_remove(runtime))
    return 0


async def _remove(runtime: str) -> None:
    from agent.verbs.client import AgentClient

    client = await AgentClient.connect()
    try:
        await client.call("Remove", "s", [runtime])
    finally:
        client.close()


def resolve(document: StatusDocument, start: str) -> str:
    """The one runtime whose id starts so. Raises `not-found` for none, `usage` for several."""
    found = [entry["id"] for entry in document["runtimes"] if entry["id"].startswith(start)]
    if len(found) == 1:
        return found[0]
    if found:
        raise OperationError(
            ErrorCode.USAGE, f"cannot tell which runtime {start} is: {len(found)} ids start so", "Give more of the id."
        )
    raise OperationError(
        ErrorCode.NOT_FOUND,
        f"cannot find runtime {start}: it is not on this board",
        "See which are: avocadoctl runtime list",
    )

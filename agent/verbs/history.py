"""avocadoctl history and watch: what happened to this board, one change in full, and the change that runs now.

History is read from the journal's own files, so it answers without the agent; it needs the right to read them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from agent.contract.errors import ErrorCode, OperationError
from agent.verbs.runtime import STATE_DIR
from agent.verbs.show import print_json, size, table

_DEFAULT_LIMIT = 20

EXAMPLES = """\
examples:
  avocadoctl history                 the last changes
  avocadoctl history show 12         every step of change 12, and why it ended as it did
  avocadoctl -o json history -n 0    all of them"""


def register(subparsers: Any) -> None:
    """Add both verbs."""
    parser = subparsers.add_parser(
        "history",
        help="the changes of this board, and one of them in full",
        description="Show what happened to this board.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", "--limit", type=int, default=_DEFAULT_LIMIT, help="how many (0: all)")
    parser.set_defaults(run=run_list)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    show = actions.add_parser("show", help="one change in full")
    show.add_argument("number", type=int, metavar="N")
    show.set_defaults(run=run_show)
    watch = subparsers.add_parser(
        "watch",
        help="follow the running change",
        description="Follow the running change to its end; without one, wait for the next.",
        epilog="example:\n  avocadoctl -H root@board watch",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    watch.set_defaults(run=run_watch)


def changes_folder() -> Path:
    """Where the journal is."""
    return STATE_DIR / "changes"


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Every change record, newest first. A file that cannot be read is left out and named on stderr."""
    try:
        paths = [path for path in folder.iterdir() if path.suffix == ".json" and path.stem.isdigit()]
    except FileNotFoundError:
        return []
    except PermissionError as cause:
        raise OperationError(ErrorCode.NOT_PERMITTED, f"cannot read {folder}", "Run it as root.") from cause
    records = []
    for path in sorted(paths, key=lambda path: int(path.stem), reverse=True):
        try:
            records.append(json.loads(path.read_bytes()))
        except (OSError, ValueError) as cause:
            print(f"avocadoctl: cannot read {path}: {cause}", file=sys.stderr)
    return records


def run_list(args: argparse.Namespace) -> int:
    """Print the newest changes."""
    records = read_records(changes_folder())
    records = records[: args.limit] if args.limit > 0 else records
    if args.output == "json":
        print_json(records)
        return 0
    rows = [
        (
            str(record["number"]),
            record["kind"],
            record["outcome"],
            record["started_at"],
            (record["to_runtime"] or "-")[:8],
            (record["reason"] or {}).get("message", ""),
        )
        for record in records
    ]
    print(table(("N", "CHANGE", "OUTCOME", "STARTED", "TO", "WHY"), rows) if rows else "no changes yet")
    return 0


def run_show(args: argparse.Namespace) -> int:
    """Print one change in full."""
    record = next((r for r in read_records(changes_folder()) if r["number"] == args.number), None)
    if record is None:
        raise OperationError(
            ErrorCode.NOT_FOUND, f"cannot find change {args.number}", "See which there are: avocadoctl history"
        )
    if args.output == "json":
        print_json(record)
    else:
        print(render(record))
    return 0


def render(record: dict[str, Any]) -> str:
    """One change as text for people."""
    moves = any(step["kind"] == "activate" for step in record["steps"])
    lines = [
        f"Change     #{record['number']} {record['kind']}, asked for by {record['requested_by']}",
        f"From       {record['from_runtime'] or 'nothing'}",
        f"To         {record['to_runtime'] or 'nothing'}",
        f"Outcome    {record['outcome']}{', not committed' if moves and not record['committed'] else ''}",
        f"Time       {record['started_at']} to {record['ended_at'] or 'now'}",
    ]
    if record["reason"]:
        lines.append(f"Why        {record['reason']['message']}")
        if record["reason"]["remedy"]:
            lines.append(f"  try: {record['reason']['remedy']}")
    facts = record["facts"]
    lines += _figures(facts)
    took_s = facts.get("took_s") or {}
    rows = [
        (
            step["kind"],
            step["phase"],
            f"{took_s[step['kind']]:.2f} s" if step["kind"] in took_s else "",
            step["warning"],
        )
        for step in record["steps"]
    ] or [(step["kind"], "planned", "", "") for step in facts.get("plan") or ()]
    tables = [table(("STEP", "PHASE", "TOOK", "WARNING"), rows)] if rows else []
    if moved := [image for image in facts.get("images") or () if image["way"] != "held"]:
        arrived = [
            (image["name"], image["way"], f"{size(image['moved_bytes'])} of {size(image['size_bytes'])}")
            for image in moved
        ]
        tables.append(table(("IMAGE", "WAY", "MOVED"), arrived))
    return "\n\n".join(["\n".join(lines), *tables])


def _figures(facts: dict[str, Any]) -> list[str]:
    lines = []
    if facts.get("image_bytes"):
        lines.append(f"Moved      {size(facts.get('moved_bytes', 0))} of {size(facts['image_bytes'])}")
    if isinstance(facts.get("away_s"), int | float):
        first = facts.get("first_backend")
        lines.append(f"Away       {facts['away_s']:.2f} s" + (f", first answer from the {first}" if first else ""))
    if facts.get("model"):
        lines.append(f"Proven     {facts['model']} on {facts.get('backend', 'no backend')}")
    return lines


def run_watch(args: argparse.Namespace) -> int:
    """Follow the running change, or the next one."""
    from agent.verbs.client import closing_line, error_of_record  # the bus library

    record = asyncio.run(_watch())
    error = error_of_record(record)
    if args.output == "json":
        print_json(record)
    elif error is None:
        print(closing_line(record))
    if error is not None:
        raise error
    return 0


async def _watch() -> dict[str, Any]:
    from agent.verbs.client import MANAGER, AgentClient, step_teller

    client = await AgentClient.connect()
    try:
        await client.subscribe()
        while True:
            running = await client.call(
                "Get", "ss", [MANAGER, "RunningChange"], interface="org.freedesktop.DBus.Properties"
            )
            if running[0].value != "/":
                return await client.follow(running[0].value, step_teller())
            await client.news()
    finally:
        client.close()

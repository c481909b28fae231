"""avocadoctl confirm and cancel: what somebody may say to a change that runs.

`confirm` keeps a change of /etc that waits for its host to come back; `deploy` says it by itself over a connection of
its own. `cancel` ends a change before its switch, or while it waits so; the board is then as it was.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from agent.verbs.show import print_json


def register(subparsers: Any) -> None:
    """Add both verbs."""
    for name, summary, said, run in (
        ("confirm", "keep a change of /etc that waits for somebody to come back", "It reverts by itself.", run_confirm),
        (
            "cancel",
            "end a running change before its switch, or while it waits to be confirmed",
            "In between it ends by itself.",
            run_cancel,
        ),
    ):
        parser = subparsers.add_parser(
            name,
            help=summary,
            description=f"{summary.capitalize()}. {said}",
            epilog=f"example:\n  avocadoctl -H root@board {name} 12",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("number", type=int, metavar="N", help="the change's number, as watch and history show it")
        parser.set_defaults(run=run)


def run_confirm(args: argparse.Namespace) -> int:
    """Confirm it."""
    from agent.verbs.client import PATH  # the bus library, which --help does not need

    asyncio.run(_say("Confirm", "o", [f"{PATH}/change/{args.number}"]))
    return _told(args, "confirmed")


def run_cancel(args: argparse.Namespace) -> int:
    """Cancel it."""
    from agent.verbs.client import CHANGE, PATH

    asyncio.run(_say("Cancel", "", [], path=f"{PATH}/change/{args.number}", interface=CHANGE))
    return _told(args, "cancelled")


async def _say(member: str, signature: str, body: list[Any], **where: Any) -> None:
    from agent.verbs.client import AgentClient

    client = await AgentClient.connect()
    try:
        await client.call(member, signature, body, **where)
    finally:
        client.close()


def _told(args: argparse.Namespace, word: str) -> int:
    if args.output == "json":
        print_json({"change": args.number, word: True})
    else:
        print(f"change #{args.number}: {word}")
    return 0

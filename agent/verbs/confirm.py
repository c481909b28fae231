"""avocadoctl confirm: come back to a board whose /etc has just changed, so that the change is kept.

`deploy` does it by itself over a connection of its own; by hand it is for a change that somebody else began.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from agent.verbs.show import print_json


def register(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "confirm",
        help="keep a change of /etc that waits for somebody to come back",
        description="Confirm the running change: it touched /etc, and reverts unless somebody comes back.",
        epilog="example:\n  avocadoctl -H root@board confirm 12",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("number", type=int, metavar="N", help="the change's number, as watch and history show it")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Confirm it."""
    asyncio.run(_confirm(args.number))
    if args.output == "json":
        print_json({"change": args.number, "confirmed": True})
    else:
        print(f"change #{args.number}: confirmed")
    return 0


async def _confirm(number: int) -> None:
    from agent.verbs.client import PATH, AgentClient  # the bus library, which --help does not need

    client = await AgentClient.connect()
    try:
        await client.call("Confirm", "o", [f"{PATH}/change/{number}"])
    finally:
        client.close()

"""avocadoctl ext, merge, unmerge, refresh: the extensions of the active runtime, and the running overlay.

Each of the three is a change like a deploy: it stops the services concerned, proves the result, and is undone when it
fails. Listing reads the status file.
"""

from __future__ import annotations

import argparse
from typing import Any

from agent.contract.status import read_status
from agent.verbs.options import add_await_host, add_dry_run, add_warm_up
from agent.verbs.show import print_json
from agent.verbs.status import extension_table, run_dir

_CHANGES = {
    "merge": ("merge the active runtime's extensions", "Merge"),
    "unmerge": ("unmerge every extension until the next boot or merge", "Unmerge"),
    "refresh": ("make the running set what the active runtime names", "Refresh"),
}
_SWITCHES = {
    "enable": "bring back an extension that was disabled on this board",
    "disable": "run without an extension of the active runtime",
}

EXAMPLES = """\
examples:
  avocadoctl ext list                  every extension on this board
  avocadoctl ext status                those that are wanted or merged, and those that are disabled here
  avocadoctl ext disable pose-config   run without it, until a deploy or `ext enable pose-config`
  avocadoctl ext refresh               after somebody ran systemd-sysext by hand"""


def register(subparsers: Any) -> None:
    """Add `ext` and its top-level aliases."""
    parser = subparsers.add_parser(
        "ext",
        help="extensions: list, status, enable, disable, merge, unmerge, refresh",
        description="See the extensions of this board, and merge or unmerge them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="every extension on this board").set_defaults(run=run_list)
    actions.add_parser("status", help="those that are wanted, merged or disabled here").set_defaults(run=run_status)
    for name, summary in _SWITCHES.items():
        switch = actions.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        switch.add_argument("extension", metavar="NAME")
        add_dry_run(switch)
        add_await_host(switch)
        add_warm_up(switch)
        switch.set_defaults(run=run_switch, change=name)
    for holder in (actions, subparsers):
        for name, (summary, _) in _CHANGES.items():
            verb = holder.add_parser(
                name, help=summary, description=f"{summary.capitalize()}.", epilog=f"example:\n  avocadoctl {name}"
            )
            add_dry_run(verb)
            add_await_host(verb)
            verb.set_defaults(run=run_change_verb, change=name)


def run_list(args: argparse.Namespace) -> int:
    """Print every extension."""
    return _print(args, wanted_only=False)


def run_status(args: argparse.Namespace) -> int:
    """Print the extensions that are wanted or merged, and those that are disabled here."""
    return _print(args, wanted_only=True)


def _print(args: argparse.Namespace, *, wanted_only: bool) -> int:
    document = read_status(run_dir())
    entries = [
        entry
        for entry in document["extensions"]
        if not wanted_only or entry["isMerged"] or entry["origin"] == "runtime" or entry.get("isDisabled")
    ]
    if args.output == "json":
        print_json(entries)
    elif entries:
        print(extension_table(entries))
    else:
        print("no extensions")
    return 0


def run_switch(args: argparse.Namespace) -> int:
    """Enable or disable an extension, and follow the change."""
    from agent.verbs.client import options_for, run_change

    options = options_for(dry_run=args.dry_run, await_host=args.await_host, warm_up=args.warm_up)
    body = [args.extension, options]
    return run_change(args.change.capitalize(), "sa{sv}", body, as_json=args.output == "json")


def run_change_verb(args: argparse.Namespace) -> int:
    """Merge, unmerge or refresh, and follow the change."""
    from agent.verbs.client import options_for, run_change  # the bus library, which listing does not need

    options = options_for(dry_run=args.dry_run, await_host=args.await_host)
    return run_change(_CHANGES[args.change][1], "a{sv}", [options], as_json=args.output == "json")

"""`avocadoctl keys init|list`: make the signing keys of a project, and see which are here and locked."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from agent.host.keys import PASSPHRASE_VARIABLE, Keys, find_passphrase, init_keys

DEFAULT_FOLDER = Path("keys")


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `keys` and its verbs; each sets `run`, a function of the parsed arguments that returns an exit status."""
    keys = subparsers.add_parser("keys", help="make and keep the signing keys")
    verbs = keys.add_subparsers(dest="keys_verb", required=True, metavar="VERB")

    init = verbs.add_parser("init", help="make the root key (keep it offline) and the online keys")
    add_keys_options(init)
    init.set_defaults(run=run_init)

    show = verbs.add_parser("list", help="which keys boards trust, and which private halves are here")
    show.add_argument("--keys", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help="the keys (default: keys)")
    show.set_defaults(run=run_list)

    for verb in (init, show):
        verb.add_argument("-o", "--output", choices=["table", "json"], default=argparse.SUPPRESS)


def add_keys_options(parser: argparse.ArgumentParser) -> None:
    """The options of every verb that signs: where the keys are, and how they are unlocked."""
    parser.add_argument("--keys", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help="the keys (default: keys)")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--passphrase-file", type=Path, metavar="FILE", help=f"instead of {PASSPHRASE_VARIABLE}")
    choice.add_argument("--no-passphrase", action="store_true", help="leave the private keys unlocked on disk")


def open_keys(arguments: argparse.Namespace) -> Keys:
    """The keys that `add_keys_options` named; a passphrase is asked of nobody, since unlocked keys need none."""
    passphrase = find_passphrase(os.environ, arguments.passphrase_file, without=arguments.no_passphrase, needed=False)
    return Keys(arguments.keys, passphrase)


def run_init(arguments: argparse.Namespace) -> int:
    """Make the keys and say what to do with them."""
    passphrase = find_passphrase(os.environ, arguments.passphrase_file, without=arguments.no_passphrase)
    keys = init_keys(arguments.keys, passphrase)
    if getattr(arguments, "output", "table") == "json":
        return run_list(arguments)
    print(f"made the keys in {keys.folder}" + ("" if passphrase else ", unlocked as asked"))
    print(f"  {keys.folder / 'root.pem'} signs only changes of keys: keep it offline")
    print(f"  {keys.folder / 'root.json'} is what boards are provisioned with")
    return 0


def run_list(arguments: argparse.Namespace) -> int:
    """Print every key of root.json."""
    found = Keys(arguments.keys).list()
    if getattr(arguments, "output", "table") == "json":
        print(json.dumps({"keys": [asdict(key) for key in found]}))
        return 0
    for key in found:
        where = ("here, locked" if key.encrypted else "here, unlocked") if key.present else "elsewhere"
        print(f"{key.name:8} {key.key_id[:16]}  {where:14}  {', '.join(key.roles)}")
    return 0

"""`avocadoctl keys ...`: make the signing keys of a project, see which are here, and change who may sign.

Every change of keys is a new signed root, or a new list of release signers; boards follow once it is published.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from agent.host.first_keys import init_keys
from agent.host.key_changes import NEXT, Outcome, add, drop, revoke, rotate, sign
from agent.host.keys import PASSPHRASE_VARIABLE, ROLES, ROOT_JSON, Keys, find_passphrase

DEFAULT_FOLDER = Path("keys")

_EXAMPLES = """\
examples:
  avocadoctl keys init                                  root, targets, releases and online
  avocadoctl keys init --root-keys 3 --root-threshold 2
  avocadoctl keys add releases ci                       one more key that may sign releases
  avocadoctl keys add releases hsm --uri 'pkcs11:token=T;object=K?module-path=/usr/lib/softhsm/libsofthsm2.so'
  avocadoctl keys rotate online                         after its machine was lost
  avocadoctl keys revoke ci
  avocadoctl keys sign                                  a pending change; without one, renew root and targets"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `keys` and its verbs; each sets `run`, a function of the parsed arguments that returns an exit status."""
    keys = subparsers.add_parser(
        "keys",
        help="make and keep the signing keys",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = keys.add_subparsers(dest="keys_verb", required=True, metavar="VERB")

    init = verbs.add_parser("init", help="make the root key (keep it offline) and all others")
    init.add_argument("--root-keys", type=int, default=1, metavar="N", help="how many root keys (default: 1)")
    init.add_argument(
        "--root-threshold", type=int, metavar="N", help="how many of them must sign a change of keys (default: all)"
    )
    show = verbs.add_parser("list", help="which keys boards trust, and which private halves are here")
    renew = verbs.add_parser("rotate", help="put a new key in the place of one")
    end = verbs.add_parser("revoke", help="a key counts no more")
    for verb in (renew, end):
        verb.add_argument("name", metavar="NAME", help="as 'keys list' shows it")
    more = verbs.add_parser("add", help="one more key that may sign for a role")
    more.add_argument(
        "group", choices=list(ROLES), help="targets signs who releases, releases what boards run, online how new it is"
    )
    more.add_argument("name", metavar="NAME")
    source = more.add_mutually_exclusive_group()
    source.add_argument("--public", type=Path, metavar="PEM", help="somebody else's: its public half")
    source.add_argument("--uri", metavar="PKCS11", help="a token's: pkcs11:token=T;object=K?module-path=FILE")
    for verb in (more, end):
        verb.add_argument("--threshold", type=int, metavar="N", help="of root: from now on so many must sign")
    put = verbs.add_parser("sign", help="sign a pending change with the root keys here, or renew root and targets")
    put.add_argument("--drop", action="store_true", help="drop the pending change instead")

    for verb in (init, renew, end, more, put):
        add_keys_options(verb)
    show.add_argument("--keys", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help="the keys (default: keys)")
    init.set_defaults(run=run_init)
    show.set_defaults(run=run_list)
    renew.set_defaults(run=_changing(lambda keys, arguments: rotate(keys, arguments.name)))
    end.set_defaults(run=_changing(lambda keys, arguments: revoke(keys, arguments.name, threshold=arguments.threshold)))
    more.set_defaults(run=_changing(_add))
    put.set_defaults(run=run_sign)
    for verb in (init, show, renew, end, more, put):
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
    keys = init_keys(arguments.keys, passphrase, root_keys=arguments.root_keys, root_threshold=arguments.root_threshold)
    if _as_json(arguments):
        return run_list(arguments)
    print(f"made the keys in {keys.folder}" + ("" if passphrase else ", unlocked as asked"))
    print(f"  {keys.folder / 'root.pem'} signs only changes of keys: keep it offline")
    print(f"  {keys.folder / 'targets.pem'} signs only who may sign releases: keep it off the machine that publishes")
    print(f"  {keys.folder / 'root.json'} is what boards are provisioned with")
    return 0


def run_list(arguments: argparse.Namespace) -> int:
    """Print every key that is trusted."""
    keys = Keys(arguments.keys)
    found = keys.list()
    if _as_json(arguments):
        root = keys.root().signed
        thresholds = {role: found.threshold for role, found in root.roles.items()}
        document = {"keys": [asdict(key) for key in found], "version": root.version, "thresholds": thresholds}
        print(json.dumps(document))
        return 0
    for key in found:
        here = {"file": "here, locked" if key.encrypted else "here, unlocked", "uri": "in a token"}
        print(f"{key.name:8} {key.key_id[:16]}  {here.get(key.place, key.place):14}  {', '.join(key.roles)}")
    return 0


def run_sign(arguments: argparse.Namespace) -> int:
    """Sign a pending change, drop it, or renew root and delegation."""
    if arguments.drop:
        drop(open_keys(arguments))
        return 0
    return _changing(lambda keys, _: sign(keys))(arguments)


def _add(keys: Keys, arguments: argparse.Namespace) -> Outcome:
    return add(
        keys,
        arguments.group,
        arguments.name,
        public=arguments.public,
        uri=arguments.uri,
        threshold=arguments.threshold,
    )


def _changing(change: Callable[[Keys, argparse.Namespace], Outcome]) -> Callable[[argparse.Namespace], int]:
    def run(arguments: argparse.Namespace) -> int:
        keys = open_keys(arguments)
        # Without a passphrase a new key would lie there unlocked beside locked ones.
        if any(key.encrypted for key in keys.list()):
            keys = Keys(
                arguments.keys, find_passphrase(os.environ, arguments.passphrase_file, without=arguments.no_passphrase)
            )
        outcome = change(keys, arguments)
        if _as_json(arguments):
            print(json.dumps(asdict(outcome)))
        elif outcome.holds:
            print(f"{outcome.role} version {outcome.version} holds, signed by {', '.join(outcome.signed_by)}")
            if outcome.delegation:
                print(f"targets version {outcome.delegation} holds, with the release signers there were")
            print("  boards follow it once it is published: avocadoctl publish, or deploy")
        else:
            by = f"signed by {', '.join(outcome.signed_by)}" if outcome.signed_by else "not signed"
            print(f"root version {outcome.version} is {by} and waits for {outcome.missing} more of the root keys")
            print(f"  carry {keys.folder / NEXT / ROOT_JSON} to their keys folder, run 'avocadoctl keys sign' there,")
            print(
                f"  put the root.json they end with at {keys.folder / NEXT / ROOT_JSON}, and run 'avocadoctl keys sign'"
            )
        return 0

    return run


def _as_json(arguments: argparse.Namespace) -> bool:
    return bool(getattr(arguments, "output", "table") == "json")

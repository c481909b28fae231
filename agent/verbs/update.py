"""avocadoctl update: the board asks a repository by itself whether there is something newer.

`avocado-update.timer` runs this with the address in `/etc/avocado/update.toml`. Whether there is something new is told
by the same trust policy as for every deploy, on a copy of the trust state; only then is the agent asked for a change,
and judges again. A runtime that this board has tried and taken back, or that somebody rolled back, is not fetched
again: a service that goes away every hour is worse than an old model. What failed on the way is tried again at the next
run, and goes on where it was; when that is, the timer says, whatever a server writes into Retry-After.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.contract.errors import ON_THE_WAY, ErrorCode, OperationError
from agent.contract.linked import LinkedRuntime
from agent.contract.manifest import Manifest
from agent.verbs.show import print_json

CONFIG = Path("/etc/avocado/update.toml")
STATE = Path("/var/lib/avocado")
_MOST_METADATA_BYTES = 32 << 20
_MENDS = "this board runs it, and its manifest is damaged here"

# What ended a change without saying anything about the runtime. Whoever owns the wire must not be able to talk a board
# out of a runtime for good by spoiling one transfer of it.
_TRANSIENT = ON_THE_WAY | {
    ErrorCode.NO_SPACE,
    ErrorCode.DISK_FAILED,
    ErrorCode.CHANGE_CANCELLED,
    ErrorCode.POWER_LOST,
    ErrorCode.AGENT_UNREACHABLE,
}

EXAMPLES = """\
examples:
  avocadoctl update                                   as the timer does it
  avocadoctl update --check
  avocadoctl update --url https://updates.example.org/boards/virtual"""


def register(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "update",
        help="fetch what the configured repository has newer; run by avocado-update.timer",
        description=f'Ask a repository for a newer runtime. Its address is `repository = "..."` in {CONFIG}.',
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", help=f"another repository than the one in {CONFIG}")
    parser.add_argument("--check", action="store_true", help="say what there is, and change nothing")
    parser.add_argument("--again", action="store_true", help="also what this board has tried and taken back, or runs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look, and change when there is something to change to."""
    url = args.url or read_config(CONFIG)
    offered, active, damaged = look(url, STATE)
    reason = "" if offered != active or args.again or damaged else "this board runs it already"
    if not reason and not args.again:
        reason = held_back(offered, asyncio.run(_changes()))
    if reason or args.check:
        _say(args, {"offered": offered, "active": active, "wanted": not reason, "reason": reason, "damaged": damaged})
        return 0
    from agent.verbs.client import run_change  # the bus library, which looking does not need

    return run_change("Deploy", "sa{sv}", [url, {}], as_json=args.output == "json")


def _say(args: argparse.Namespace, found: Mapping[str, Any]) -> None:
    if args.output == "json":
        print_json(found)
    else:
        mends = found["damaged"] and found["offered"] == found["active"]
        print(f"runtime {found['offered']}: {found['reason'] or (_MENDS if mends else 'newer than what runs here')}")


def read_config(path: Path) -> str:
    """The repository's address. Raises `bad-config`, and `not-found` without the file."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as cause:
        raise OperationError(
            ErrorCode.NOT_FOUND,
            f"cannot update: {path} is not there",
            f'Write `repository = "https://..."` into {path}, or give --url.',
        ) from cause
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as cause:
        raise OperationError(ErrorCode.BAD_CONFIG, f"cannot read {path}: {cause}", f"Correct {path}.") from cause
    unknown = sorted(set(document) - {"repository"})
    if unknown or not isinstance(document.get("repository"), str):
        why = f"{unknown[0]}: nobody knows this key" if unknown else "repository: an address is expected"
        raise OperationError(ErrorCode.BAD_CONFIG, f"cannot read {path}: {why}", f"Correct {path}.")
    address: str = document["repository"]
    return address


def look(url: str, state: Path) -> tuple[str, str, bool]:
    """The runtime a repository offers this board, the active one, and whether that one's manifest is damaged.

    Raises what a deploy would be refused with, and `downgrade-refused` where nobody can tell whether it is newer.
    """
    from agent.observe import read_board
    from agent.ports.clock import SystemClock
    from agent.ports.fetch import HttpFetcher
    from agent.ports.files import FileStore
    from agent.ports.runtimes import FileRuntimes
    from agent.staged import active_manifest
    from agent.trust import Trust, open_source
    from agent.trust_state import Seen, load_seen, scratch

    runtimes = FileRuntimes(state)
    board = read_board(state)

    active = active_manifest(runtimes)
    with scratch("avocado-update-") as folder:
        # The agent alone writes what it trusts; this only reads, and forgets.
        copy = folder / "metadata"
        _copy_trust(state / "metadata", copy)
        trust = Trust(
            copy, str(board.get("target", "")), str(board.get("arch", "")), lambda: active, SystemClock().now, _write
        )
        has_floor = load_seen(copy).built_at != Seen().built_at
        source = open_source(HttpFetcher(url), trust, FileStore(state))
        try:
            manifest = source.manifest()
        finally:
            source.close()
    if isinstance(active, LinkedRuntime) and not has_floor:
        _check_newer(manifest, active)
    return manifest.id, active.id if active else "", isinstance(active, LinkedRuntime)


def _check_newer(offered: Manifest, active: LinkedRuntime) -> None:
    """For where trust has no floor and no person judges: it is the runtime itself, or newer than all that is known."""
    if offered.id == active.id or (active.newest_known and offered.built_at > active.newest_known):
        return
    raise OperationError(
        ErrorCode.DOWNGRADE_REFUSED,
        f"cannot update to runtime {offered.runtime.name} {offered.runtime.version}: the manifest of the active one is"
        " damaged, and nothing on this board tells that this one is newer",
        "Deploy from the host: avocadoctl deploy -H BOARD",
    )


def held_back(runtime: str, changes: Sequence[Mapping[str, Any]]) -> str:
    """Why a runtime is not fetched by itself, from the changes of this board, newest first; empty: nothing is known."""
    for change in changes:
        number, outcome, reason = change["number"], change["outcome"], change.get("reason") or {}
        if change.get("to_runtime") == runtime:
            if outcome in ("reverted", "stuck") and reason.get("code") not in _TRANSIENT:
                why = reason.get("message") or "it has no reason"
                return f"change #{number} took it back ({why}); to try again: avocadoctl update --again"
            if outcome == "applied":
                return ""
        elif change.get("from_runtime") == runtime and outcome == "applied" and change["kind"] in _BY_HAND:
            return f"change #{number} ({change['kind']}) went away from it; to go back: avocadoctl update --again"
    return ""


_BY_HAND = ("rollback", "activate")


async def _changes() -> list[dict[str, Any]]:
    from agent.verbs.client import AgentClient

    client = await AgentClient.connect()
    try:
        found: list[dict[str, Any]] = json.loads((await client.call("ListChanges", "u", [0]))[0])
        return found
    finally:
        client.close()


def _copy_trust(folder: Path, copy: Path) -> None:
    try:
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        if size <= _MOST_METADATA_BYTES:
            shutil.copytree(folder, copy, symlinks=True)
            return
        why = f"it holds {size} bytes"
    except OSError as cause:
        why = cause.strerror or "a file in it cannot be read"
    raise OperationError(
        ErrorCode.TRUST_STATE_DAMAGED, f"cannot update: {folder} is damaged: {why}", f"Look at what is in {folder}."
    )


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)

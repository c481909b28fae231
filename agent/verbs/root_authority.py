"""avocadoctl root-authority: whom this board trusts, from the newest root it has accepted.

Reads the provisioned root and the ones a repository has led to since; the newest is in force, with the release signers
of the delegation that was accepted last. Needs neither the bus nor the agent.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from agent.contract.delta import RELEASES
from agent.contract.errors import ErrorCode, OperationError
from agent.verbs.show import print_json, table

METADATA = Path("/var/lib/avocado/metadata")
_MAX_BYTES = 64 * 1024
_NAME_FIELD = "x-avocado-name"


def register(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "root-authority",
        help="the keys this board trusts, and until when",
        description="Show the root of trust this board holds: keys, roles, thresholds, version and expiry.",
        epilog="examples:\n  avocadoctl root-authority\n  avocadoctl -H root@board -o json root-authority",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the root in force."""
    root = read_root(Path(os.environ.get("AVOCADO_METADATA_DIR", METADATA)))
    if args.output == "json":
        print_json(root)
        return 0
    since = "" if root["provisioned_version"] == root["version"] else f", provisioned {root['provisioned_version']}"
    print(f"root version {root['version']}{since}, expires {root['expires']}")
    rows = [(key["name"] or "-", key["key_id"][:16], key["type"], ", ".join(key["roles"])) for key in root["keys"]]
    print(table(("KEY", "ID", "TYPE", "SIGNS"), rows))
    many = [f"{role} needs {count}" for role, count in root["thresholds"].items() if count > 1]
    if many:
        print("signatures: " + ", ".join(many))
    return 0


def read_root(folder: Path) -> dict[str, Any]:
    """The root in force, as `-o json` prints it. Raises `not-found`, `not-permitted`, `trust-state-damaged`."""
    provisioned = _read(folder / "root.json")
    newest = provisioned
    for path in (folder / "cache" / "root_history").glob("*.root.json"):
        try:
            found = _read(path)
        except OperationError:
            continue  # the agent leaves a damaged one out, too, and fetches it again
        if found["version"] > newest["version"]:
            newest = found
    signers, releases = _delegated(folder / "cache" / "targets.json")
    roles = {**newest["roles"], **releases}
    keys = [
        {
            "key_id": key_id,
            "name": key.get(_NAME_FIELD),
            "type": key["keytype"],
            "public": key["keyval"]["public"],
            "roles": [role for role, entry in roles.items() if key_id in entry["keyids"]],
        }
        for key_id, key in {**newest["keys"], **signers}.items()
    ]
    return {
        "version": newest["version"],
        "provisioned_version": provisioned["version"],
        "expires": newest["expires"],
        "thresholds": {role: entry["threshold"] for role, entry in roles.items()},
        "keys": keys,
    }


def _delegated(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The release signers' keys and role; none before the first repository, or when the cache is damaged."""
    try:
        found = json.loads(path.read_bytes()[:_MAX_BYTES])["signed"]["delegations"]
        [role] = found["roles"]
        return dict(found["keys"]), {RELEASES: {"keyids": list(role["keyids"]), "threshold": int(role["threshold"])}}
    except (OSError, ValueError, KeyError, TypeError):
        return {}, {}


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            signed: dict[str, Any] = json.loads(stream.read(_MAX_BYTES))["signed"]
        int(signed["version"]), dict(signed["roles"]), dict(signed["keys"])
    except FileNotFoundError as cause:
        raise OperationError(
            ErrorCode.NOT_FOUND,
            "cannot say whom this board trusts: it was not provisioned",
            "On the host: avocadoctl provision --help",
        ) from cause
    except PermissionError as cause:
        raise OperationError(
            ErrorCode.NOT_PERMITTED, f"cannot read {path}", "Run it as root or as a member of the group avocado."
        ) from cause
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise OperationError(
            ErrorCode.TRUST_STATE_DAMAGED,
            f"cannot say whom this board trusts: {path} does not read ({cause})",
            "Provision this board again with 'avocadoctl provision'; its runtimes stay.",
        ) from cause
    return signed

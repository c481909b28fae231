"""The keys a project begins with: made once, and never in place of others.

One of each by default; several holders of root keys where a change of keys shall take more than one of them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from tuf.api.metadata import Metadata, Root

from agent.contract.delta import RELEASES
from agent.contract.errors import ErrorCode, OperationError
from agent.host.delegation import first_delegation, keep_delegation
from agent.host.keys import ROLES, ROOT_JSON, ROOT_LIFE, TARGETS_JSON, Keys, keep_root, key_named

_LEAST_PASSPHRASE = 8
_MOST_ROOT_KEYS = 16


def init_keys(
    folder: Path,
    passphrase: bytes | None,
    *,
    root_keys: int = 1,
    root_threshold: int | None = None,
    now: datetime | None = None,
) -> Keys:
    """Make all keys, the first root and the first delegation. Raises `keys` when there are some: none is replaced.

    `root_keys`: how many root keys there are, of which `root_threshold` (default: all) must sign a change of keys.
    """
    taken = [path.name for pattern in ("*.pem", ROOT_JSON, TARGETS_JSON) for path in folder.glob(pattern)]
    if taken:
        raise OperationError(
            ErrorCode.KEYS,
            f"cannot make keys in {folder}: it already holds {', '.join(sorted(taken))}",
            "Name another folder; boards trust the keys they were provisioned with.",
        )
    if passphrase is not None and len(passphrase) < _LEAST_PASSPHRASE:
        raise OperationError(
            ErrorCode.KEYS, f"cannot use this passphrase: it is shorter than {_LEAST_PASSPHRASE} characters"
        )
    threshold = root_keys if root_threshold is None else root_threshold
    if not 1 <= threshold <= root_keys <= _MOST_ROOT_KEYS:
        raise OperationError(
            ErrorCode.USAGE,
            f"cannot demand {threshold} signatures of {root_keys} root keys",
            f"Make 1 to {_MOST_ROOT_KEYS} root keys, and demand at most as many signatures.",
        )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    keys = Keys(folder, passphrase)
    moment = (now or datetime.now(UTC)).replace(microsecond=0)
    root = Root(version=1, expires=moment + ROOT_LIFE, consistent_snapshot=True)
    roots = ["root", *(f"root-{number}" for number in range(2, root_keys + 1))]
    for name in [*roots, "targets", "online"]:
        public = keys.make(folder / f"{name}.pem")
        for role in ROLES.get(name, ("root",)):
            root.add_key(public, role)
    root.roles["root"].threshold = threshold
    signed = Metadata(root)
    for name in roots:
        signed.sign(keys.signer_of(name, key_named(root, name)), append=True)
    keep_root(folder, signed)
    keep_delegation(keys, first_delegation(keys, keys.make(folder / f"{RELEASES}.pem"), moment))
    return Keys(folder, passphrase)

"""The delegation of releases: `targets.json` of a keys folder, in which the product's owner names the release signers.

It lists no file. It delegates every file that a repository holds to one role, `releases`, whose keys sign what boards
run; only a `targets` key signs it, so signers come and go without the root key, and a build machine needs neither.
Every publication carries it. Boards follow no other delegation (tuf_client.py).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from securesystemslib.signer import Key
from tuf.api.exceptions import UnsignedMetadataError
from tuf.api.metadata import DelegatedRole, Delegations, Metadata, Targets

from agent.contract.delta import RELEASE_PATHS, RELEASES
from agent.contract.errors import ErrorCode, OperationError
from agent.host.keys import TARGETS_JSON, Keys, replace_file

DELEGATION_LIFE = timedelta(days=365)


def first_delegation(keys: Keys, signer: Key, now: datetime) -> Metadata[Targets]:
    """A delegation to one signer. Raises `keys`."""
    role = DelegatedRole(RELEASES, [signer.keyid], 1, terminating=True, paths=list(RELEASE_PATHS))
    return _sign(keys, Targets(delegations=Delegations({signer.keyid: signer}, {RELEASES: role})), now)


def next_delegation(keys: Keys, change: Callable[[Targets], None], now: datetime | None = None) -> Metadata[Targets]:
    """The next version, changed and signed by a `targets` key for a year; not kept yet. Raises `keys`."""
    targets = keys.delegation().signed
    change(targets)
    return _sign(keys, targets, now or datetime.now(UTC))


def keep_delegation(keys: Keys, signed: Metadata[Targets]) -> None:
    """This delegation is the one that publications carry from now on."""
    replace_file(keys.folder / TARGETS_JSON, signed.to_bytes())


def is_signed(keys: Keys) -> bool:
    """Whether the root in force trusts the keys that signed the delegation."""
    signed = keys.delegation()
    try:
        keys.root().signed.verify_delegate("targets", signed.signed_bytes, signed.signatures)
    except UnsignedMetadataError:
        return False
    return True


def signed_delegation(keys: Keys) -> Metadata[Targets]:
    """The delegation as a publication carries it. Raises `keys` when boards would not believe it."""
    if not is_signed(keys):
        raise OperationError(
            ErrorCode.KEYS,
            f"cannot publish: no key that signs targets has signed {keys.folder / TARGETS_JSON}",
            "Run 'avocadoctl keys sign' where the targets key is, and copy targets.json from there.",
        )
    return keys.delegation()


def _sign(keys: Keys, targets: Targets, now: datetime) -> Metadata[Targets]:
    moment = now.replace(microsecond=0)
    # Above every version before, in whichever copy of the folder that was made.
    targets.version = max(int(moment.timestamp()), targets.version + 1)
    targets.expires = moment + DELEGATION_LIFE
    signed = Metadata(targets)
    signed.sign(keys.signer("targets"))
    return signed

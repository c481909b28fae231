"""Runs python-tuf on one repository, and says in this agent's words what it refused and who can mend it.

The library walks the root chain, counts signatures and checks expiry, versions, hashes and lengths. What it raises does
not tell apart what an operator must: a timestamp that was not renewed from a root that ran out, an older publication
from files of two, a missing signature from a stranger's. Every document is bounded and read strictly before it sees it.

`targets` signs who releases, and lists nothing; the role it delegates to lists every file (TUF 4.5, 5.6.7). Exactly one
role is followed, one step, for exactly the names a repository holds: whatever else is delegated is refused.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from tuf.api import exceptions as tuf
from tuf.api.metadata import DelegatedRole, Targets
from tuf.api.serialization import DeserializationError
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from agent.contract.delta import MANIFEST_NAME, RELEASE_PATHS, RELEASES
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import format_time
from agent.ports.protocols import Fetcher
from agent.signed_json import check_metadata, role_of
from agent.trust_state import MAX_METADATA_BYTES, MAX_ROOT_BYTES, ROLES, Seen, damaged_anchor

# Everything but the images has to arrive within this.
REFRESH_S = 300.0
_CONFIG = UpdaterConfig(
    max_root_rotations=64,
    max_delegations=1,
    root_max_length=MAX_ROOT_BYTES,
    timestamp_max_length=16 * 1024,
    snapshot_max_length=64 * 1024,
    targets_max_length=MAX_METADATA_BYTES,
)
# What a length in signed metadata may ask for at most: the key that signs it is online.
_MOST_BYTES = {
    "snapshot": _CONFIG.snapshot_max_length,
    "targets": MAX_ROOT_BYTES,  # keys, as in the root
    RELEASES: MAX_METADATA_BYTES,
}

Documents = dict[str, dict[str, Any]]


def untrusted(why: str, code: ErrorCode = ErrorCode.METADATA_INVALID) -> OperationError:
    """The error for a repository whose documents contradict the rules or one another."""
    return OperationError(
        code,
        f"cannot trust the repository: {why}",
        "Publish again with avocadoctl, and look at who else can write to the repository.",
    )


def incomplete(message: str) -> OperationError:
    """The error for a file that a whole repository has."""
    return OperationError(
        ErrorCode.REPOSITORY_INCOMPLETE, message, "Check that this address serves the whole of a published repository."
    )


def rolled_back(why: str) -> OperationError:
    """The error for anything older than what was accepted before."""
    return OperationError(
        ErrorCode.ROLLBACK_REFUSED,
        f"cannot trust the repository: it is older than what this board has seen ({why})",
        "Publish again on the host, which makes newer versions.",
    )


class Metadata(FetcherInterface):
    """Metadata for python-tuf: bounded in size, in time as a whole, and read strictly before it is parsed."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._files = fetcher
        # The document that was read last, for messages.
        self.last = ""
        self.document: dict[str, Any] = {}
        self._until = time.monotonic() + REFRESH_S

    def _fetch(self, url: str) -> Iterator[bytes]:
        raise NotImplementedError

    def download_bytes(self, url: str, max_length: int) -> bytes:
        """The document. A file that is not there is told apart, since the root chain ends with one."""
        self.last = Path(url).name
        limit = min(max_length, _MOST_BYTES.get(role_of(self.last), max_length))
        try:
            data = b"".join(self._in_time(url, self._files.get(url, limit)))
        except OperationError as error:
            if error.code is ErrorCode.NOT_FOUND:
                raise tuf.DownloadHTTPError(error.message, 404) from error
            raise
        self.document = check_metadata(data, self.last)
        return data

    def _in_time(self, url: str, pieces: Iterator[bytes]) -> Iterator[bytes]:
        # Each file has its own bound, and a hostile root chain has many files.
        for piece in pieces:
            if time.monotonic() > self._until:
                raise OperationError(
                    ErrorCode.FETCH_TIMEOUT,
                    f"cannot fetch {url}: the repository's metadata took more than {REFRESH_S:g} s",
                    "Check the connection, then deploy again.",
                )
            yield piece


def run_client(work: Path, anchor: bytes, fetcher: Metadata, moment: datetime, seen: Seen) -> Documents:
    """Refresh in `work` and give each role's document that was accepted."""
    try:
        client = Updater(str(work), "metadata/", fetcher=fetcher, config=_CONFIG, bootstrap=anchor)
    except (tuf.RepositoryError, DeserializationError) as cause:
        raise damaged_anchor(_plain(cause.__cause__ or cause)) from cause
    # The library takes the clock itself; ours has a floor.
    client._trusted_set.reference_time = moment
    try:
        client.refresh()
        known = client._trusted_set
        _check_delegation(known.targets)
        client.get_targetinfo(MANIFEST_NAME)  # which is delegated: loads the role
        _check_releases(cast("Targets", known[RELEASES]), known.targets)
    except tuf.UnsignedMetadataError as cause:
        raise _unsigned(str(cause)) from cause
    except tuf.ExpiredMetadataError as cause:
        raise _expired(client, role_of(fetcher.last), moment) from cause
    except tuf.BadVersionNumberError as cause:
        raise _other_version(fetcher, seen) from cause
    except tuf.LengthOrHashMismatchError as cause:
        raise untrusted(f"{fetcher.last} is not the one its publication names", ErrorCode.METADATA_MIXED) from cause
    except tuf.DownloadHTTPError as cause:
        raise incomplete(str(cause)) from cause
    except DeserializationError as cause:
        raise untrusted(f"{fetcher.last} does not read ({_plain(cause.__cause__ or cause)})") from cause
    except (tuf.RepositoryError, tuf.DownloadError) as cause:
        raise untrusted(_plain(cause)) from cause
    return {role: json.loads((work / f"{role}.json").read_bytes()) for role in ROLES}


def _check_delegation(targets: Targets) -> None:
    """The owner's document delegates what a repository holds to the releases, and nothing else to nobody else."""
    if targets.targets:
        raise _delegation("its targets list files themselves, which only releases may")
    roles = (targets.delegations and targets.delegations.roles) or {}
    if len(roles) != 1:
        raise _delegation(f"its targets delegate to {len(roles)} roles, exactly one is followed")
    if (role := roles.get(RELEASES)) is None:
        raise _delegation(f"its targets delegate to {str(next(iter(roles)))[:64]!a}, only releases is followed")
    if role.terminating is not True or role.paths != list(RELEASE_PATHS):
        raise _delegation(f"its targets delegate other than {', '.join(RELEASE_PATHS)}, for good, to releases")


def _check_releases(releases: Targets, targets: Targets) -> None:
    """The releases list what was delegated to them, and hand nothing on, to themselves neither."""
    if releases.delegations is not None:
        raise _delegation("its releases delegate on, which is not followed")
    role = cast("DelegatedRole", targets.get_delegated_role(RELEASES))
    for name in releases.targets:
        if not role.is_delegated_path(name):
            raise untrusted(f"its releases list {name}, which was not delegated to them", ErrorCode.NOT_DELEGATED)


def _delegation(why: str) -> OperationError:
    return untrusted(why, ErrorCode.DELEGATION_REFUSED)


def _unsigned(why: str) -> OperationError:
    some = re.search(r" ([1-9]\d*)/\d+ keys\Z", why)
    return OperationError(
        ErrorCode.THRESHOLD_UNMET if some else ErrorCode.SIGNATURE_INVALID,
        f"cannot trust the repository: {why}",
        "Have the other holders of that role's keys sign it too."
        if some
        else "Publish with the keys this board was provisioned with.",
    )


def _expired(client: Updater, last: str, moment: datetime) -> OperationError:
    """Which document is past its time decides which key is needed, and whether somebody may be holding this board.

    What is known may be past its time, and then nothing that hangs on it is read; `last` itself becomes known only if
    it is not.
    """
    known = client._trusted_set
    role = next((role for role in ROLES if role in known and known[role].is_expired(moment)), last)
    renew = "Renew it on the host with 'avocadoctl keys sign' and publish"
    code, remedy = {
        "root": (ErrorCode.ROOT_EXPIRED, renew),
        "targets": (ErrorCode.METADATA_EXPIRED, renew),
        RELEASES: (ErrorCode.METADATA_EXPIRED, "Publish again on the host"),
    }.get(role, (ErrorCode.REPOSITORY_STALE, "Run 'avocadoctl publish --refresh' on the host"))
    return OperationError(
        code,
        f"cannot trust the repository: its {role} is expired (it is {format_time(moment)} here)",
        f"{remedy}; if the time shown is wrong, set this board's clock.",
    )


def _other_version(fetcher: Metadata, seen: Seen) -> OperationError:
    """A version that is not the one expected: an older publication, or files of two of them."""
    signed = fetcher.document["signed"]
    named = {role_of(fetcher.last): signed["version"]}
    if signed["_type"] in ("timestamp", "snapshot"):
        named |= {name.removesuffix(".json"): entry["version"] for name, entry in signed["meta"].items()}
    for role in ROLES:
        if role in named and named[role] < getattr(seen, role):
            return rolled_back(f"{role} version {named[role]}, seen {getattr(seen, role)}")
    why = f"{fetcher.last} is version {signed['version']}, which its publication does not name"
    return untrusted(why, ErrorCode.METADATA_MIXED)


def _plain(cause: BaseException) -> str:
    """Its words, as far as they may reach a terminal: they can quote the document."""
    text = str(cause)[:200] or type(cause).__name__
    if isinstance(cause, KeyError):
        text = f"there is no {text}"
    return text if text.isprintable() else ascii(text)

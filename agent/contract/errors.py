"""Every way an operation can fail, with the exit status and the D-Bus name a caller may rely on.

One base class carries what a person needs (what cannot be done, and what to type next) and what a program needs (a
code and facts). The table below is the only place where a code gets its exit status; `docs/operations.md` prints it.
Messages begin with "cannot"; a remedy is an imperative sentence, or absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

DBUS_PREFIX = "org.avocado.Error."


class ErrorCode(StrEnum):
    """Stable names: they appear on disk, on the bus and in JSON."""

    INTERNAL = "internal"
    USAGE = "usage"
    AGENT_UNREACHABLE = "agent-unreachable"
    NOT_PERMITTED = "not-permitted"
    CHANGE_RUNNING = "change-running"
    NOT_FOUND = "not-found"
    UNSUPPORTED = "unsupported"
    NEWER_SCHEMA = "newer-schema"

    BAD_CONFIG = "bad-config"
    BAD_PROJECT = "bad-project"
    BAD_MANIFEST = "bad-manifest"
    BAD_IMAGE = "bad-image"

    SIGNATURE_INVALID = "signature-invalid"
    THRESHOLD_UNMET = "threshold-unmet"
    KEY_COUNTED_TWICE = "key-counted-twice"
    DELEGATION_REFUSED = "delegation-refused"
    NOT_DELEGATED = "not-delegated"
    ROOT_EXPIRED = "root-expired"
    METADATA_EXPIRED = "metadata-expired"
    REPOSITORY_STALE = "repository-stale"
    ROLLBACK_REFUSED = "rollback-refused"
    DOWNGRADE_REFUSED = "downgrade-refused"
    WRONG_TARGET = "wrong-target"
    INCOMPATIBLE = "incompatible"
    REQUIREMENT_UNMET = "requirement-unmet"
    TRUST_STATE_DAMAGED = "trust-state-damaged"
    METADATA_INVALID = "metadata-invalid"
    METADATA_MALFORMED = "metadata-malformed"
    METADATA_MIXED = "metadata-mixed"
    DUPLICATE_MEMBER = "duplicate-member"
    NAME_REFUSED = "name-refused"
    ENTRY_INVALID = "entry-invalid"
    REPOSITORY_INCOMPLETE = "repository-incomplete"

    FETCH_FAILED = "fetch-failed"
    FETCH_TOO_LARGE = "fetch-too-large"
    FETCH_TIMEOUT = "fetch-timeout"
    FETCH_REDIRECTED = "fetch-redirected"
    FETCH_COMPRESSED = "fetch-compressed"
    FETCH_UNBOUNDED = "fetch-unbounded"
    FETCH_WRONG_PART = "fetch-wrong-part"
    SERVER_UNAVAILABLE = "server-unavailable"
    NOT_HTTP = "not-http"
    LENGTH_MISMATCH = "length-mismatch"
    HASH_MISMATCH = "hash-mismatch"
    NO_SPACE = "no-space"
    DISK_FAILED = "disk-failed"
    DELTA_INVALID = "delta-invalid"
    DELTA_WRONG_BASE = "delta-wrong-base"
    DELTA_WRONG_RESULT = "delta-wrong-result"

    UNIT_FAILED = "unit-failed"
    NPU_BUSY = "npu-busy"
    SWITCH_FAILED = "switch-failed"
    UNHEALTHY = "unhealthy"
    STEP_TIMEOUT = "step-timeout"
    CHANGE_REVERTED = "change-reverted"
    CHANGE_STUCK = "change-stuck"
    CHANGE_CANCELLED = "change-cancelled"
    POWER_LOST = "power-lost"
    NOT_CONFIRMED = "not-confirmed"

    SSH_FAILED = "ssh-failed"
    HANDSHAKE_FAILED = "handshake-failed"

    BUILD_FAILED = "build-failed"
    TOOL_MISSING = "tool-missing"
    KEYS = "keys"


EXIT_STATUS: Mapping[ErrorCode, int] = {
    ErrorCode.INTERNAL: 1,
    ErrorCode.USAGE: 2,
    ErrorCode.AGENT_UNREACHABLE: 3,
    ErrorCode.NOT_PERMITTED: 4,
    ErrorCode.CHANGE_RUNNING: 5,
    ErrorCode.NOT_FOUND: 6,
    ErrorCode.UNSUPPORTED: 7,
    ErrorCode.NEWER_SCHEMA: 8,
    ErrorCode.BAD_CONFIG: 10,
    ErrorCode.BAD_PROJECT: 11,
    ErrorCode.BAD_MANIFEST: 12,
    ErrorCode.BAD_IMAGE: 13,
    ErrorCode.SIGNATURE_INVALID: 20,
    ErrorCode.METADATA_EXPIRED: 21,
    ErrorCode.ROLLBACK_REFUSED: 22,
    ErrorCode.WRONG_TARGET: 23,
    ErrorCode.INCOMPATIBLE: 24,
    ErrorCode.REQUIREMENT_UNMET: 25,
    ErrorCode.TRUST_STATE_DAMAGED: 26,
    ErrorCode.METADATA_INVALID: 27,
    ErrorCode.THRESHOLD_UNMET: 28,
    ErrorCode.REPOSITORY_STALE: 29,
    ErrorCode.FETCH_FAILED: 30,
    ErrorCode.FETCH_TOO_LARGE: 31,
    ErrorCode.FETCH_TIMEOUT: 32,
    ErrorCode.HASH_MISMATCH: 33,
    ErrorCode.NO_SPACE: 34,
    ErrorCode.DELTA_INVALID: 35,
    ErrorCode.DELTA_WRONG_BASE: 36,
    ErrorCode.SERVER_UNAVAILABLE: 37,
    ErrorCode.FETCH_REDIRECTED: 38,
    ErrorCode.FETCH_COMPRESSED: 39,
    ErrorCode.UNIT_FAILED: 40,
    ErrorCode.NPU_BUSY: 41,
    ErrorCode.SWITCH_FAILED: 42,
    ErrorCode.UNHEALTHY: 43,
    ErrorCode.STEP_TIMEOUT: 44,
    ErrorCode.CHANGE_REVERTED: 45,
    ErrorCode.CHANGE_STUCK: 46,
    ErrorCode.CHANGE_CANCELLED: 47,
    ErrorCode.POWER_LOST: 48,
    ErrorCode.NOT_CONFIRMED: 49,
    ErrorCode.SSH_FAILED: 50,
    ErrorCode.HANDSHAKE_FAILED: 51,
    ErrorCode.BUILD_FAILED: 60,
    ErrorCode.TOOL_MISSING: 61,
    ErrorCode.KEYS: 62,
    ErrorCode.ROOT_EXPIRED: 70,
    ErrorCode.DOWNGRADE_REFUSED: 71,
    ErrorCode.METADATA_MIXED: 72,
    ErrorCode.METADATA_MALFORMED: 73,
    ErrorCode.DUPLICATE_MEMBER: 74,
    ErrorCode.KEY_COUNTED_TWICE: 75,
    ErrorCode.NAME_REFUSED: 76,
    ErrorCode.ENTRY_INVALID: 77,
    ErrorCode.REPOSITORY_INCOMPLETE: 78,
    ErrorCode.DELEGATION_REFUSED: 79,
    ErrorCode.FETCH_UNBOUNDED: 80,
    ErrorCode.FETCH_WRONG_PART: 81,
    ErrorCode.NOT_HTTP: 82,
    ErrorCode.LENGTH_MISMATCH: 83,
    ErrorCode.DELTA_WRONG_RESULT: 84,
    ErrorCode.NOT_DELEGATED: 85,
    ErrorCode.DISK_FAILED: 86,
}

# What whoever stands between a board and its repository can bring about without a key. It says nothing about a runtime.
ON_THE_WAY = frozenset(
    {
        ErrorCode.FETCH_FAILED,
        ErrorCode.FETCH_TOO_LARGE,
        ErrorCode.FETCH_TIMEOUT,
        ErrorCode.FETCH_REDIRECTED,
        ErrorCode.FETCH_COMPRESSED,
        ErrorCode.FETCH_UNBOUNDED,
        ErrorCode.FETCH_WRONG_PART,
        ErrorCode.SERVER_UNAVAILABLE,
        ErrorCode.NOT_HTTP,
        ErrorCode.LENGTH_MISMATCH,
        ErrorCode.HASH_MISMATCH,
        ErrorCode.REPOSITORY_INCOMPLETE,
    }
)


class OperationError(Exception):
    """An operation that was refused or failed, said so that a stranger knows what to type next."""

    def __init__(self, code: ErrorCode, message: str, remedy: str = "", facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.remedy = remedy
        self.facts: dict[str, Any] = dict(facts or {})

    @property
    def exit_status(self) -> int:
        """The process exit status for this code."""
        return EXIT_STATUS[self.code]

    @property
    def dbus_name(self) -> str:
        """`org.avocado.Error.` and the code in CamelCase."""
        return dbus_name(self.code)

    def as_dict(self) -> dict[str, Any]:
        """The four fields, as JSON prints them."""
        return {"code": self.code.value, "message": self.message, "remedy": self.remedy, "facts": self.facts}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> OperationError:
        """The inverse of `as_dict`; a code this version does not know becomes `internal`."""
        try:
            code = ErrorCode(fields.get("code", "internal"))
        except ValueError:
            code = ErrorCode.INTERNAL
        return cls(code, str(fields.get("message", "")), str(fields.get("remedy", "")), dict(fields.get("facts") or {}))


class HostGoneError(OperationError):
    """The other end of a deploy is gone. It does not come back, as a server does: nobody asks it again."""


def printable(text: str) -> str:
    """The text with whatever would move a terminal's cursor, or reorder a line, spelt out: others had a hand in it."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


def dbus_name(code: ErrorCode) -> str:
    """`change-running` -> `org.avocado.Error.ChangeRunning`."""
    return DBUS_PREFIX + "".join(word.capitalize() for word in code.value.split("-"))


def code_of_dbus_name(name: str) -> ErrorCode:
    """The code behind a D-Bus error name; `internal` for a name that is not ours."""
    return _BY_DBUS_NAME.get(name, ErrorCode.INTERNAL)


_BY_DBUS_NAME = {dbus_name(code): code for code in ErrorCode}

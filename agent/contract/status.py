"""The status document: what `/run/avocado/status.json`, `Describe()` and `avocadoctl status -o json` all say.

Upstream's keys are kept as they are (`runtime`, `extensions` with camelCase names); ours stand beside them in
snake_case. The document is plain JSON values, so that a reader needs nothing but this module and `json`: no bus, no
model classes. Who may read it is the file's mode.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from agent.contract.errors import ErrorCode, OperationError

SCHEMA = 1
RUN_DIR = Path("/run/avocado")
FILE_NAME = "status.json"
MAX_BYTES = 4 << 20
# The state in `inference` of a pose service that is on the bus and does not answer, or not in JSON. `last_seen` beside
# it is its last answer with `seen_boottime_s`, or null where it has given none since the start of the agent.
SILENT = "silent"


class RuntimeEntry(TypedDict):
    """One runtime, as people know it."""

    name: str
    version: str
    id: str
    built_at: str
    manifest_version: int
    disabled: NotRequired[list[str]]  # what is left out of the signed runtime on this board


class ExtensionEntry(TypedDict):
    """One extension from both sides: what the runtime wants and what systemd merged."""

    name: str
    version: str
    isSysext: bool
    isConfext: bool
    isMerged: bool
    origin: str  # runtime | other-runtime | foreign
    imageId: str
    shortId: str
    sha256: str
    merge_name: str
    services: list[str]
    isUnknown: NotRequired[bool]  # nobody could tell what is merged; the problems say why
    isDisabled: NotRequired[bool]  # left out on this board, and back with `ext enable`


class ServiceEntry(TypedDict):
    """A unit that an extension owns."""

    name: str
    load: str
    active: str
    sub: str
    result: str
    restarts: int


class ProblemEntry(TypedDict):
    """Something that is not as it should be, and what to type next."""

    code: str
    message: str
    remedy: str


class ChangeEntry(TypedDict):
    """The running change, or the last one."""

    number: int
    kind: str
    outcome: str
    step: str
    from_runtime: str | None
    to_runtime: str | None
    started_at: str
    ended_at: str
    reason: ProblemEntry | None
    facts: dict[str, Any]


class AgentEntry(TypedDict):
    """Which process wrote the document, and when. The `_s` fields count from boot and do not follow clock changes."""

    version: str
    pid: int
    started_ticks: int
    interval_s: float
    updated_at: str
    updated_boottime_s: float


class SwitchingEntry(TypedDict):
    """How a change switches the overlays: `gapless`, or `reload` and why not the other."""

    way: str
    reason: str


class StatusDocument(TypedDict):
    """The whole document."""

    schema: int
    target: str
    arch: str
    agent: AgentEntry
    runtime: RuntimeEntry | None
    previous: RuntimeEntry | None
    runtimes: list[RuntimeEntry]  # every one on disk
    extensions: list[ExtensionEntry]
    services: list[ServiceEntry]
    inference: dict[str, Any] | None  # what the pose service says; None: nobody owns its name
    change: ChangeEntry | None
    switching: NotRequired[SwitchingEntry]
    problems: list[ProblemEntry]


def change_entry(record: Mapping[str, Any]) -> ChangeEntry:
    """The part of a change record's document that a status shows."""
    moving = [step["kind"] for step in record["steps"] if step["phase"] in ("doing", "undoing")]
    return {
        "number": record["number"],
        "kind": record["kind"],
        "outcome": record["outcome"],
        "step": moving[-1] if moving else "",
        "from_runtime": record["from_runtime"],
        "to_runtime": record["to_runtime"],
        "started_at": record["started_at"],
        "ended_at": record["ended_at"],
        "reason": record["reason"],
        "facts": record["facts"],
    }


def progress_of(record: Mapping[str, Any]) -> tuple[int, str]:
    """How far a change record's document is, in percent, and the step that moves or how it ended."""
    steps, facts = record["steps"], record["facts"]
    moving = [step for step in steps if step["phase"] in ("doing", "undoing")]
    word = f"{'undo ' if moving[-1]['phase'] == 'undoing' else ''}{moving[-1]['kind']}" if moving else record["outcome"]
    if record["outcome"] != "running" or not steps:
        return 100, word
    ended = sum(step["phase"] in ("done", "undone") for step in steps)
    done, total = int(facts.get("bytes_done", 0)), int(facts.get("bytes_total", 0))
    within = done / total if total and moving and not ended else 0.0
    return int(100 * (ended + within) / len(steps)), word


def agent_entry(version: str, interval_s: float, updated_at: str) -> AgentEntry:
    """The entry of the process that calls this."""
    return {
        "version": version,
        "pid": os.getpid(),
        "started_ticks": _started_ticks(os.getpid()) or 0,
        "interval_s": interval_s,
        "updated_at": updated_at,
        "updated_boottime_s": round(boottime_s(), 3),
    }


def boottime_s() -> float:
    """Seconds since boot, suspend included; the same for every process."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def read_status(run_dir: Path) -> StatusDocument:
    """The document as the agent last wrote it, with a problem added when the agent is gone or silent.

    Raises `agent-unreachable` when there is none, `not-permitted` when this user may not read it.
    """
    path = run_dir / FILE_NAME
    try:
        with path.open("rb") as stream:
            document: StatusDocument = json.loads(stream.read(MAX_BYTES))
        age_problem = staleness(document["agent"])
    except FileNotFoundError as cause:
        raise OperationError(
            ErrorCode.AGENT_UNREACHABLE,
            "cannot read the board's status: the agent has not run since the boot",
            "See why: systemctl status avocadod",
        ) from cause
    except PermissionError as cause:
        raise OperationError(
            ErrorCode.NOT_PERMITTED,
            f"cannot read {path}: permission denied",
            "Run it as root or as a member of the group avocado.",
        ) from cause
    except (ValueError, KeyError, TypeError) as cause:
        raise OperationError(
            ErrorCode.INTERNAL, f"cannot read {path}: it is not a status document", "Run: systemctl restart avocadod"
        ) from cause
    if age_problem:
        document["problems"] = [age_problem, *document["problems"]]
    return document


def staleness(agent: AgentEntry) -> ProblemEntry | None:
    """Why the document may no longer be true, or None."""
    age_s = max(0.0, boottime_s() - agent["updated_boottime_s"])
    if _started_ticks(agent["pid"]) != agent["started_ticks"]:
        return {
            "code": "agent-gone",
            "message": f"the agent is not running; this status is {age_s:.0f} s old",
            "remedy": "See why: systemctl status avocadod",
        }
    # Three intervals: one may be late because the machine is busy.
    if age_s > 3 * agent["interval_s"]:
        return {
            "code": "agent-silent",
            "message": f"the agent has not written its status for {age_s:.0f} s",
            "remedy": "See what it does: journalctl -b -n 30 -u avocadod",
        }
    return None


def _started_ticks(pid: int) -> int | None:
    # A pid is used again; the start time beside it is not.
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])  # killed, and only not reaped yet

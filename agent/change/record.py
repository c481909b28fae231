"""The record of one change: what the journal keeps, the bus shows and `history` reads.

Schema 1, additive only: keys that a later version adds are ignored here, a newer schema number is refused politely.
Records are frozen; every step of the engine makes a new one, so that readers in other threads never see half of one.

The life of a step's phase:

    pending -> doing -> done
                 |        |
                 +--------+--> undoing -> undone        (before the commit only)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from agent.contract.errors import ErrorCode, OperationError
from agent.plan import StepSpec

SCHEMA = 1


class Phase(StrEnum):
    """How far a step is."""

    PENDING = "pending"
    DOING = "doing"
    DONE = "done"
    UNDOING = "undoing"
    UNDONE = "undone"


class Outcome(StrEnum):
    """How a change stands. Everything but `running` is final; a `planned` one is a dry run and touched nothing."""

    RUNNING = "running"
    APPLIED = "applied"
    REVERTED = "reverted"
    STUCK = "stuck"
    CANCELLED = "cancelled"
    PLANNED = "planned"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a change did not, or not quite, do what was asked."""

    code: ErrorCode
    message: str
    remedy: str = ""

    @classmethod
    def of(cls, error: OperationError) -> Reason:
        """The part of an error that a record keeps."""
        return cls(error.code, error.message, error.remedy)

    def as_error(self) -> OperationError:
        """The error again."""
        return OperationError(self.code, self.message, self.remedy)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step with how far it is and what its undo needs.

    `volatile`: it has begun and a reboot undoes it, which an agent that does not know the kind reads here.
    """

    kind: str
    inputs: dict[str, Any]
    phase: Phase = Phase.PENDING
    memo: dict[str, Any] = field(default_factory=dict)
    warning: str = ""
    volatile: bool = False


@dataclass(frozen=True, slots=True)
class NewChange:
    """A change that has not begun: what was asked, by whom, and the plan. `plan_only`: it never begins."""

    kind: str
    requested_by: str
    from_runtime: str | None
    to_runtime: str | None
    steps: Sequence[StepSpec]
    facts: Mapping[str, Any] = field(default_factory=dict)
    plan_only: bool = False


@dataclass(frozen=True, slots=True)
class ChangeRecord:
    """The whole document. `boot_id` is the boot in which the change began; times are wall time, for people."""

    number: int
    kind: str
    boot_id: str
    requested_by: str
    from_runtime: str | None
    to_runtime: str | None
    steps: tuple[StepRecord, ...]
    started_at: str
    ended_at: str = ""
    outcome: Outcome = Outcome.RUNNING
    committed: bool = False
    reverting: bool = False
    reason: Reason | None = None
    attempts: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> StepRecord | None:
        """The step being done or undone, if any."""
        return next((step for step in self.steps if step.phase in (Phase.DOING, Phase.UNDOING)), None)

    def with_step(self, index: int, **changes: Any) -> ChangeRecord:
        """A record in which one step differs."""
        steps = list(self.steps)
        steps[index] = replace(steps[index], **changes)
        return replace(self, steps=tuple(steps))

    def as_dict(self) -> dict[str, Any]:
        """The JSON document, its schema number first."""
        reason = self.reason
        return {
            "schema": SCHEMA,
            "number": self.number,
            "kind": self.kind,
            "boot_id": self.boot_id,
            "requested_by": self.requested_by,
            "from_runtime": self.from_runtime,
            "to_runtime": self.to_runtime,
            "outcome": self.outcome.value,
            "committed": self.committed,
            "reverting": self.reverting,
            "reason": reason and {"code": reason.code.value, "message": reason.message, "remedy": reason.remedy},
            "attempts": self.attempts,
            "steps": [
                {
                    "kind": s.kind,
                    "inputs": s.inputs,
                    "phase": s.phase.value,
                    "memo": s.memo,
                    "warning": s.warning,
                    "volatile": s.volatile,
                }
                for s in self.steps
            ],
            "facts": self.facts,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
        }

    def as_bytes(self) -> bytes:
        """The document as the journal writes it."""
        return (json.dumps(self.as_dict()) + "\n").encode()


def summary(record: ChangeRecord) -> str:
    """The line that closes a change: how it ended, and why, or what it moved and how long the services were away."""
    line = f"change {record.number} ({record.kind}) {record.outcome.value}"
    if record.reason is not None:
        return f"{line}: {record.reason.message}"
    facts = record.facts
    parts = []
    if facts.get("image_bytes"):
        parts.append(f"{facts.get('moved_bytes', 0)} of {facts['image_bytes']} bytes moved")
    if "away_s" in facts:
        parts.append(f"services away for {facts['away_s']:.2f} s")
    if "backend" in facts:
        parts.append(f"back on the {facts['backend']}")
    return f"{line}: {', '.join(parts)}" if parts else line


def parse_record(data: bytes) -> ChangeRecord:
    """Read a record. Raises OperationError `newer-schema`, or `internal` for bytes that are no record."""
    try:
        document = json.loads(data)
        schema = document["schema"]
        if schema > SCHEMA:
            raise OperationError(
                ErrorCode.NEWER_SCHEMA,
                f"cannot read the change record: schema {schema}, this agent reads {SCHEMA}",
                "Activate the runtime whose agent wrote it.",
            )
        return _from_document(document)
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        raise OperationError(ErrorCode.INTERNAL, f"cannot read the change record: {cause!r}") from cause


def _from_document(document: Mapping[str, Any]) -> ChangeRecord:
    reason = document["reason"]
    return ChangeRecord(
        number=int(document["number"]),
        kind=document["kind"],
        boot_id=document["boot_id"],
        requested_by=document["requested_by"],
        from_runtime=document["from_runtime"],
        to_runtime=document["to_runtime"],
        steps=tuple(
            StepRecord(
                s["kind"],
                s["inputs"],
                Phase(s["phase"]),
                s["memo"],
                s.get("warning", ""),
                volatile=s.get("volatile") is True,
            )
            for s in document["steps"]
        ),
        started_at=document["started_at"],
        ended_at=document["ended_at"],
        outcome=Outcome(document["outcome"]),
        committed=bool(document["committed"]),
        reverting=bool(document["reverting"]),
        reason=reason and Reason.of(OperationError.from_dict(reason)),
        attempts=int(document["attempts"]),
        facts=dict(document["facts"]),
    )

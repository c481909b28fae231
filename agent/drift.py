"""What was changed behind the agent's back, as far as its own journal tells.

The newest committed change says what the board was left as: which runtime boots, and which model answered when health
was proven. Somebody who edits the link or a model's folder is shown as a problem with a remedy; nothing is adopted.
What is merged and what runs is compared with the runtime itself (extensions.py, observe.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from agent.change.record import ChangeRecord, Outcome
from agent.extensions import Problem


class Left:
    """What the newest committed change left."""

    def __init__(self) -> None:
        self._record: ChangeRecord | None = None

    def start(self, records: Iterable[ChangeRecord]) -> None:
        """The journal as it is at the start, newest first."""
        self._record = next((record for record in records if _counts(record)), None)

    def note(self, record: ChangeRecord) -> None:
        """A change's record as it is now."""
        if _counts(record):
            self._record = record

    def differences(self, active: str | None, model: str) -> list[Problem]:
        """Where the board differs from what was left; `model` is the one that answers, empty where none does."""
        record = self._record
        if record is None:
            return []
        if active != record.to_runtime:
            return [
                Problem(
                    "active-edited",
                    f"the board boots runtime {active or 'none'}, but change {record.number} left {record.to_runtime}",
                    f"Go back with 'avocadoctl runtime activate {record.to_runtime}', or deploy again.",
                )
            ]
        proven = record.facts.get("model")
        if model and proven and model != proven:
            return [
                Problem(
                    "model-differs",
                    f"model {model} answers, but change {record.number} proved {proven}",
                    "Start the service from the merged set: avocadoctl refresh",
                )
            ]
        return []


def _counts(record: ChangeRecord) -> bool:
    return record.outcome is Outcome.APPLIED and record.committed and record.to_runtime is not None

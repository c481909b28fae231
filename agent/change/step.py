"""What a step is: one state of the board that a change reaches and can leave again.

The engine knows steps only by this protocol, a step never knows the engine. `prepare` only reads; its memo is on disk
before `do` runs. `do` reaches a state, so running it twice is harmless, and waits with a deadline. `undo` mirrors it
and accepts a half-finished `do`. A step raises OperationError for everything it cannot do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

Inputs = Mapping[str, Any]
Memo = dict[str, Any]


class Shutdown(BaseException):
    """The daemon is stopping: not a failure. Raised out of a wait; the journal stays, the next start decides."""


class Report(Protocol):
    """What a step may say while it works."""

    def progress(self, done: int, total: int) -> None:
        """Bytes (or parts) done, of how many. Raises `change-cancelled` where the change may still be cancelled."""

    def stop_if_cancelled(self) -> None:
        """For a step that waits. Raises `change-cancelled` as `progress` does."""

    def fact(self, name: str, value: Any) -> None:
        """A JSON value the record keeps: image_bytes, moved_bytes, away_s, backend ..."""

    def warn(self, message: str) -> None:
        """Something an operator should read that does not end the change."""


class Step(Protocol):
    """One kind of step."""

    kind: str
    commits: bool  # its one atomic effect makes the change final; then it is a CommitStep
    volatile: bool  # a reboot undoes it by itself, so in a later boot there is nothing to undo
    cancellable: bool  # until the next step begins, the change may be cancelled, unless it is final

    def prepare(self, inputs: Inputs) -> Memo:
        """Reads what `do` and `undo` will need, as JSON values."""

    def do(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """The state is reached."""

    def undo(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """The state before it is reached again, whether or not `do` finished. What it reports, the record keeps."""


@runtime_checkable
class CommitStep(Protocol):
    """The step that commits can tell whether it did: the device is asked, not the journal."""

    def happened(self, inputs: Inputs) -> bool:
        """The change is final on this device."""

"""switch_overlay: the running overlay is exactly the wanted set; the boot set is untouched.

Read back afterwards: systemd ignores an image it does not like and still says success.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.change.step import Inputs, Memo, Report
from agent.contract.errors import ErrorCode, OperationError
from agent.ports.protocols import Overlay, Runtimes

SWITCH_TIMEOUT_S = 30.0
Names = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class SwitchOverlay:
    """Inputs: `from` and `to` (runtime ids or None), `from_names` and `to_names` (merge names per kind)."""

    overlay: Overlay
    runtimes: Runtimes

    kind = "switch_overlay"
    commits = False
    volatile = True
    cancellable = False

    def prepare(self, inputs: Inputs) -> Memo:
        """What is merged now, ours or not."""
        return {"merged": self._merged()}

    def do(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """The wanted set is merged, and nothing else."""
        self._show(inputs["to"])
        merged = self._merged()
        _require(inputs["to_names"], merged)
        surplus = _minus(merged, inputs["to_names"])
        if surplus:
            raise OperationError(
                ErrorCode.SWITCH_FAILED,
                f"cannot switch the overlay: {_say(surplus)} is merged too",
                "Ask for the change again, and run neither systemd-sysext nor systemd-confext meanwhile.",
            )

    def undo(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """What of the old set was merged before is merged again."""
        self._show(inputs["from"])
        before = {
            kind: [n for n in names if n in memo["merged"].get(kind, ())]
            for kind, names in inputs["from_names"].items()
        }
        _require(before, self._merged())

    def _show(self, runtime_id: str | None) -> None:
        folder = None if runtime_id is None else self.runtimes.folder(runtime_id)
        self.overlay.show(folder, SWITCH_TIMEOUT_S)

    def _merged(self) -> dict[str, list[str]]:
        return {kind.value: list(names) for kind, names in self.overlay.merged().names.items()}


def _require(wanted: Names, merged: Names) -> None:
    missing = _minus(wanted, merged)
    if missing:
        raise OperationError(
            ErrorCode.SWITCH_FAILED,
            f"cannot switch the overlay: systemd did not merge {_say(missing)}",
            "See why: journalctl -b -n 30 -u systemd-sysext.service -u systemd-confext.service",
        )


def _minus(names: Names, other: Names) -> dict[str, list[str]]:
    rest = {kind: [name for name in listed if name not in other.get(kind, ())] for kind, listed in names.items()}
    return {kind: listed for kind, listed in rest.items() if listed}


def _say(names: Names) -> str:
    return ", ".join(f"{kind} {name}" for kind, listed in names.items() for name in listed)

"""release_npu: none of our processes holds the accelerator's device nodes, and the driver has had its time to settle.

A process of somebody else (a compositor that shares the driver) is reported and left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent.change.step import Inputs, Memo, Report
from agent.change.steps.releases import AffectedUnits
from agent.contract.errors import ErrorCode, OperationError
from agent.ports.protocols import Clock, Holder, Npu

RELEASE_TIMEOUT_S = 10.0
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class ReleaseNpu:
    """Inputs: `nodes`, `settle_s`, `contexts` as the service described them, and what stop_services stops.

    `silent`: it described nothing when the change was planned, so they are what an earlier change was told.
    """

    npu: Npu
    affected: AffectedUnits
    clock: Clock

    kind = "release_npu"
    commits = False
    volatile = True
    cancellable = True

    def prepare(self, inputs: Inputs) -> Memo:
        """Whose processes are ours."""
        return {"units": self.affected.to_stop(inputs)}

    def do(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """The nodes are free of us, and settled."""
        nodes = inputs["nodes"]
        if not memo["units"]:
            return  # nobody was stopped, so whoever holds the NPU may keep it
        if inputs.get("silent"):
            report.warn("pose.service does not answer on the bus; the NPU is taken to be as the last change knew it")
        if not nodes:
            report.warn("skipped: no service has said yet which device nodes the NPU has")
            return
        foreign = self._wait(nodes, memo["units"])
        if foreign:
            report.warn(f"left alone, not ours: {_names(foreign)}")
        self.clock.sleep(inputs["settle_s"])
        report.fact("npu", {"nodes": nodes, "settle_s": inputs["settle_s"], "contexts": inputs["contexts"]})

    def _wait(self, nodes: Sequence[str], units: Sequence[str]) -> list[Holder]:
        deadline = self.clock.monotonic() + RELEASE_TIMEOUT_S
        while True:
            holders = self.npu.holders(nodes, units)
            ours = [holder for holder in holders if holder.ours]
            if not ours:
                return holders
            if self.clock.monotonic() >= deadline:
                raise _busy(ours)
            self.clock.sleep(POLL_S)

    def undo(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """Nothing: whoever starts takes the nodes again."""


def _busy(ours: Sequence[Holder]) -> OperationError:
    stuck = [holder for holder in ours if holder.process.state == "D"]
    if stuck:
        process = stuck[0].process
        remedy = f"Reboot the board: pid {process.pid} hangs in the kernel at {process.wchan or 'an unknown place'}."
    else:
        remedy = f"End pid {ours[0].process.pid}, then ask for the change again."
    return OperationError(
        ErrorCode.NPU_BUSY,
        f"cannot release the NPU: {_names(ours)}, still after {RELEASE_TIMEOUT_S:g} s",
        remedy,
        {"pids": [holder.process.pid for holder in ours]},
    )


def _names(holders: Sequence[Holder]) -> str:
    return ", ".join(map(str, holders))

"""Who holds the accelerator: every process that has one of its device nodes open or mapped.

Nodes are compared by path, since two nodes can share a device number (a simulated NPU is a null device). A process that
ends while it is looked at holds nothing. One that may not be looked into (a container's protected init) is passed over
unless it is ours: "nobody holds it" must not be said of ourselves unseen. One whose map cannot be read in time hangs in
the kernel, perhaps in the accelerator's driver, and counts as a holder. Processes are never signalled.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from agent.contract.errors import ErrorCode, OperationError
from agent.ports.proc import PATIENCE_S, PROC, Mapped, MapReader, describe, pids, unit_of
from agent.ports.protocols import Holder


class ProcNpu:
    """The Npu port on /proc."""

    def __init__(self, proc: Path = PROC, patience_s: float = PATIENCE_S) -> None:
        self._proc = proc
        self._maps = MapReader(proc, patience_s)

    def holders(self, nodes: Sequence[str], units: Sequence[str]) -> list[Holder]:
        """Every process with one of the nodes open or mapped; `units` says which are ours."""
        wanted = {os.path.realpath(node): node for node in nodes}
        found = []
        for pid, mapped in self._maps.read(pids(self._proc)).items():
            try:
                held = self._held(pid, mapped, frozenset(wanted))
                if held:
                    found += [self._holder(pid, wanted[path], units, certain=True) for path in sorted(held)]
                elif mapped is None:
                    found.append(self._holder(pid, nodes[0], units, certain=False))
            except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                continue
            except PermissionError as cause:
                self._refuse_ours(pid, units, cause)
        return found

    def _held(self, pid: int, mapped: Mapped, paths: frozenset[str]) -> set[str]:
        if isinstance(mapped, PermissionError):
            raise mapped
        # A node can be closed and still be mapped, and then the driver's context lives on.
        held = set(paths & (mapped or frozenset()))
        folder = self._proc / str(pid) / "fd"
        for descriptor in os.listdir(folder):  # noqa: PTH208 - names only, this runs for every process
            try:
                target = os.readlink(folder / descriptor)  # noqa: PTH115
            except FileNotFoundError:  # closed meanwhile
                continue
            if target in paths:
                held.add(target)
        return held

    def _holder(self, pid: int, node: str, units: Sequence[str], *, certain: bool) -> Holder:
        process = describe(pid, self._proc)
        return Holder(process, node, ours=process.unit in units, certain=certain)

    def _refuse_ours(self, pid: int, units: Sequence[str], cause: PermissionError) -> None:
        try:
            unit = unit_of((self._proc / str(pid) / "cgroup").read_text(errors="replace"))
        except (FileNotFoundError, ProcessLookupError):
            return
        if unit in units:
            raise OperationError(
                ErrorCode.NPU_BUSY,
                f"cannot tell whether pid {pid} of {unit} holds the NPU: {cause.strerror}",
                "Let avocadod keep CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH.",
            ) from cause

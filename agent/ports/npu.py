"""Who holds the accelerator: every process that has one of its device nodes open or mapped.

Nodes are compared by path, since two nodes can share a device number (a simulated NPU is a null device). A process that
ends while it is looked at holds nothing. One that may not be looked into (a container's protected init) is passed over
unless it is ours: "nobody holds it" must not be said of ourselves unseen. Processes are never signalled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from agent.contract.errors import ErrorCode, OperationError
from agent.ports.protocols import Holder

PROC = Path("/proc")


class ProcNpu:
    """The Npu port on /proc."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc

    def holders(self, nodes: Sequence[str], units: Sequence[str]) -> list[Holder]:
        """Every process with one of the nodes open or mapped; `units` says which are ours."""
        wanted = {os.path.realpath(node): node for node in nodes}
        found = []
        for process in self._processes():
            try:
                held = _held(process, frozenset(wanted))
                found += [_describe(process, wanted[path], units) for path in sorted(held)]
            except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                continue
            except PermissionError as cause:
                _refuse_ours(process, units, cause)
        return found

    def _processes(self) -> Iterator[Path]:
        for name in sorted((name for name in os.listdir(self._proc) if name.isdigit()), key=int):  # noqa: PTH208
            yield self._proc / name


def _held(process: Path, paths: frozenset[str]) -> set[str]:
    held = set()
    for descriptor in os.listdir(process / "fd"):  # noqa: PTH208 - names only, this runs for every process
        try:
            target = os.readlink(process / "fd" / descriptor)  # noqa: PTH115
        except FileNotFoundError:  # closed meanwhile
            continue
        if target in paths:
            held.add(target)
    # A node can be closed and still be mapped, and then the driver's context lives on.
    with (process / "maps").open(encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5] in paths:
                held.add(fields[5])
    return held


def _refuse_ours(process: Path, units: Sequence[str], cause: PermissionError) -> None:
    try:
        unit = _unit_of((process / "cgroup").read_text(errors="replace"))
    except (FileNotFoundError, ProcessLookupError):
        return
    if unit in units:
        raise OperationError(
            ErrorCode.NPU_BUSY,
            f"cannot tell whether pid {process.name} of {unit} holds the NPU: {cause.strerror}",
            "Let avocadod keep CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH.",
        ) from cause


def _describe(process: Path, node: str, units: Sequence[str]) -> Holder:
    unit = _unit_of((process / "cgroup").read_text(errors="replace"))
    # The command's name stands in brackets and may hold any character, brackets too.
    state = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    try:
        wchan = (process / "wchan").read_text(errors="replace").strip()
    except PermissionError:
        wchan = ""
    return Holder(
        pid=int(process.name),
        comm=(process / "comm").read_text(errors="replace").strip(),
        state=state,
        wchan="" if wchan == "0" else wchan,
        node=node,
        unit=unit,
        ours=unit in units,
    )


def _unit_of(cgroup: str) -> str:
    for line in cgroup.splitlines():
        hierarchy, _, rest = line.partition(":")
        path = rest.partition(":")[2]
        if hierarchy != "0" and "name=systemd" not in rest:
            continue
        for part in reversed(path.split("/")):
            if part.endswith((".service", ".scope")):
                return part
    return ""

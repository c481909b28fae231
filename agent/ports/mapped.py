"""Which services have which files mapped, so that a change can stop those that run from an image it replaces.

Only what a change could stop and start again counts: services of the system's manager with a unit file. A login
session, a user's manager and a transient unit are somebody's own; their processes keep the old image until they end.
"""

from __future__ import annotations

from pathlib import Path

from agent.ports.proc import PATIENCE_S, PROC, MapReader, describe, pids
from agent.ports.protocols import MappedFiles, Process

TRANSIENT = Path("/run/systemd/transient")
_NOT_FILES = ("[", "/dev/", "/memfd:", "/SYSV", "anon_inode:")


class ProcMappings:
    """The Mappings port on /proc."""

    def __init__(self, proc: Path = PROC, transient: Path = TRANSIENT, patience_s: float = PATIENCE_S) -> None:
        self._proc = proc
        self._transient = transient
        self._maps = MapReader(proc, patience_s)

    def by_service(self) -> MappedFiles:
        """Every service's mapped files, and the processes of services whose map cannot be read in time."""
        processes = self._of_services()
        files: dict[str, set[str]] = {}
        of_each: dict[int, frozenset[str]] = {}
        unread: list[Process] = []
        for pid, mapped in self._maps.read(processes).items():
            if mapped is None:
                unread.append(processes[pid])
            elif not isinstance(mapped, PermissionError):  # a container's protected init: not from our images
                of_each[pid] = frozenset(path for path in mapped if not path.startswith(_NOT_FILES))
                files.setdefault(processes[pid].unit, set()).update(of_each[pid])
        return MappedFiles({unit: frozenset(paths) for unit, paths in files.items()}, tuple(unread), of_each)

    def _of_services(self) -> dict[int, Process]:
        found: dict[int, Process] = {}
        for pid in pids(self._proc):
            try:
                process = describe(pid, self._proc)
            except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                continue
            if self._can_come_back(process.unit):
                found[pid] = process
        return found

    def _can_come_back(self, unit: str) -> bool:
        return unit.endswith(".service") and not unit.startswith("user@") and not (self._transient / unit).exists()

"""The running board: a systemd-nspawn with control groups of its own, found again by their name and by nothing else.

No pid file is kept: what runs in the board's control groups is the board, whoever started it and however that ended.
Without a parent group of its own, nspawn would make its groups in the root of the hierarchy, where two boards collide.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.device.host import mounts
from tests.device.process import BoardError, holds_within

# nspawn itself changes mounts only before the board starts; the agent on the board does so while it runs.
SYSTEM_CALLS = "@mount @swap bpf"


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The board's groups: one in each hierarchy that systemd uses on this host."""

    name: str

    def folders(self) -> list[Path]:
        """The groups' folders, whether they exist or not."""
        return [
            point / self.name
            for point, kind, options in mounts()
            if point.is_relative_to("/sys/fs/cgroup")
            and (kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")))
        ]

    def create(self) -> list[Path]:
        """Make the groups, and return the files through which a process joins them."""
        for folder in self.folders():
            folder.mkdir(exist_ok=True)
        return [folder / "cgroup.procs" for folder in self.folders()]

    def pids(self) -> list[int]:
        """Every process in the groups; one that has ended and was not waited for does not count."""
        found: set[int] = set()
        for folder in self.folders():
            for path, _, _ in os.walk(folder):
                with suppress(OSError):  # a group that was removed while we looked
                    found.update(int(pid) for pid in (Path(path) / "cgroup.procs").read_text().split())
        return sorted(pid for pid in found if _status(pid).get("State", "X")[0] not in "XZ")

    def kill(self) -> None:
        """End every process in the groups, at once."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove(self) -> None:
        """Remove the groups; they must be empty."""
        if not holds_within(self._removed, timeout_s=10):
            raise BoardError(f"cannot remove the control groups {self.name}: {self.traces()}")

    def traces(self) -> list[str]:
        """What of these groups is still there."""
        return [f"control group {folder}" for folder in self.folders() if folder.exists()]

    def _removed(self) -> bool:
        for folder in self.folders():
            for path, _, _ in os.walk(folder, topdown=False):
                with suppress(OSError):  # busy, or just gone
                    Path(path).rmdir()
        return not self.traces()


def start(
    groups: ControlGroups, *, hostname: str, root: Path, nodes: Path, network: Path, log: Path
) -> subprocess.Popen[bytes]:
    """Start the board's systemd. Returns at once; the console goes to `log`."""
    nspawn = [
        "systemd-nspawn", "--boot", "--register=no", "--keep-unit", "--quiet",
        f"--machine={groups.name}", f"--hostname={hostname}", f"--directory={root}",
        f"--network-namespace-path={network}",
        "--capability=all", f"--system-call-filter={SYSTEM_CALLS}",
        "--resolv-conf=off", "--timezone=off", "--link-journal=no", "--console=pipe",
        *(f"--bind={node}:/dev/{node.name}" for node in sorted(nodes.iterdir())),
    ]  # fmt: skip
    # It must be in the groups before nspawn looks where it is, and every process can move itself.
    joining = 'while [ "$1" != -- ]; do echo $$ > "$1"; shift; done; shift; exec "$@"'
    argv = ["sh", "-ec", joining, "sh", *map(str, groups.create()), "--", *nspawn]
    with log.open("wb") as console:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
        )


def init_pid(groups: ControlGroups) -> int | None:
    """The host's number for the board's process 1, or None while there is none."""
    depth = len(_status(os.getpid()).get("NSpid", "").split())
    for pid in groups.pids():
        numbers = _status(pid).get("NSpid", "").split()
        if len(numbers) == depth + 1 and numbers[-1] == "1":
            return pid
    return None


def inside(pid: int) -> list[str]:
    """The command that runs another one in the board whose process 1 is `pid`, with a clean environment."""
    environment = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin", "HOME=/root", "TERM=dumb", "LANG=C.UTF-8"]
    spaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--wd"]
    return ["nsenter", f"--target={pid}", *spaces, "env", "--ignore-environment", *environment]


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

"""One virtual board, from nothing to running and back to nothing.

`Board.create` gives a board with a disk, a network and keys, not yet booted; what is to be on its disk before it
boots is written through `provision`. Every wait has a limit, and what did not happen in time is a `BoardError` that
shows the end of the board's console. As a context manager, a board is destroyed at the end, whatever happened; should
its process be killed, the next board that is made on this host clears it away.

`python3 -m tests.device.board` is the command line behind `make board`; see `command.py`.
"""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from tests.device import nspawn, rootfs, slots
from tests.device.access import Access
from tests.device.forward import Forward
from tests.device.host import install_tools, obstacle
from tests.device.process import POLL_S, BoardError, holds_within, run

TREE = Path(__file__).resolve().parents[2]
UP_STATES = ("running", "degraded")
LOG_LINES = 25


class Board:
    """A board that has been created. Two boards on one host share nothing but the kernel."""

    def __init__(self, name: str, slot: slots.Slot) -> None:
        self.name = name
        self.slot = slot
        self._record = slots.Record(name=name, tree=str(TREE), owner=None)
        self.access = Access(self._record.access_folder, slot.network)
        self.log = slot.folder / "console.log"
        self._nspawn: subprocess.Popen[bytes] | None = None
        self._forwards: list[Forward] = []

    @classmethod
    def create(cls, name: str) -> Board:
        """A new board that lives as long as this process, in place of an earlier one of that name."""
        if (reason := obstacle()) is not None:
            raise BoardError(f"cannot create board {name}: {reason}")
        install_tools()
        template = rootfs.template()
        if (earlier := cls.find(name)) is not None:
            earlier.destroy()
        board = cls(name, slots.allocate(slots.Record(name=name, tree=str(TREE), owner=slots.this_process())))
        try:
            board.slot.disk.create(template)
            board._write_identity()
        except BaseException:
            board.destroy()
            raise
        return board

    @classmethod
    def find(cls, name: str) -> Board | None:
        """The board of this work tree that has that name, made by whichever process."""
        slot = slots.find(name, TREE)
        return None if slot is None else cls(name, slot)

    def keep(self) -> None:
        """Let the board outlive this process, until somebody destroys it."""
        self.slot.write_record(self._record)

    def provision(self, write: Callable[[Path], object]) -> None:
        """Call `write` with the path at which the board's root file system is mounted. The board must be off."""
        if self.is_running():
            raise BoardError(f"cannot provision board {self.name}: it is running")
        self.slot.disk.mount()
        write(self.slot.disk.root)

    def boot(self, *, timeout_s: float = 60) -> str:
        """Boot, and return systemd's verdict once it has one: `running`, or `degraded` when a unit failed."""
        if self.is_running():
            raise BoardError(f"cannot boot board {self.name}: it is running")
        self._reap()
        self.slot.groups.remove()
        self.slot.disk.mount()
        self.slot.disk.sync()  # what was provisioned is on the disk as if it had been flashed
        self.slot.network.up()
        self._nspawn = nspawn.start(
            self.slot.groups,
            hostname=self.name,
            root=self.slot.disk.root,
            nodes=self.slot.disk.nodes,
            network=Path("/run/netns") / self.slot.network.board_namespace,
            log=self.log,
        )
        try:
            return self._wait_until_up(timeout_s)
        except BaseException:
            self.kill_hard()
            raise

    def exec(
        self, argv: Sequence[str], *, timeout_s: float = 30, input_text: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on the board as root without ssh, 20 ms away."""
        init = nspawn.init_pid(self.slot.groups)
        if init is None:
            raise BoardError(f"cannot run {argv[0]} on board {self.name}: it is not running")
        doing = f"run `{' '.join(argv)}` on board {self.name}"
        line = [*nspawn.inside(init), *argv]
        return run(line, doing=doing, timeout_s=timeout_s, input_text=input_text, check=check)

    def mounts(self) -> list[str]:
        """Where something is mounted, but for what comes and goes with a session or a service that starts."""
        places = [line.split()[4] for line in self.exec(["cat", "/proc/1/mountinfo"]).stdout.splitlines()]
        return sorted(place for place in places if not place.startswith(("/run/credentials/", "/run/user/")))

    def ssh(
        self,
        argv: Sequence[str] | str,
        *,
        user: str = "root",
        timeout_s: float = 30,
        input_text: str | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the board over ssh. A string is handed to the board's shell as it is."""
        return self.access.ssh(argv, user=user, input_text=input_text, timeout_s=timeout_s, check=check)

    def ssh_command(self, user: str = "root") -> list[str]:
        """The start of an ssh command line that reaches the board."""
        return self.access.command(user)

    def put(self, source: Path, destination: str, *, user: str = "root", timeout_s: float = 60) -> None:
        """Copy a file or a folder to the board over ssh."""
        self.access.copy(source, destination, user=user, timeout_s=timeout_s)

    def forward(self, board_port: int, *, host_port: int = 0) -> Forward:
        """Bring a port of the board to 127.0.0.1 of the host, over ssh; port 0 takes a free one."""
        way = Forward(self.ssh_command(), board_port, host_port=host_port)
        self._forwards.append(way)
        return way

    def is_running(self) -> bool:
        """Whether anything of the board runs, booted or not."""
        return bool(self.slot.groups.pids())

    def poweroff(self, *, timeout_s: float = 30) -> None:
        """Shut down in order; fine when it is off."""
        self._leave("poweroff", timeout_s)

    def reboot(self, *, timeout_s: float = 60) -> str:
        """Shut down in order and boot again."""
        # The container ends with the board's reboot; the new start is ours to make.
        self._leave("reboot", timeout_s)
        return self.boot(timeout_s=timeout_s)

    def wait_until_off(self, *, timeout_s: float = 30) -> None:
        """Wait for a board that goes down by itself."""
        if not holds_within(lambda: not self.is_running(), timeout_s):
            raise self._failure(f"board {self.name} did not go down within {timeout_s:g} s")
        self._reap()

    def kill_hard(self) -> None:
        """End every process at once. The disk keeps what was written, synced or not; compare `power_cut`."""
        self.slot.stop()
        self._reap()

    def power_cut(self) -> None:
        """Cut the power at this instant: what was not synced to the disk is lost. The board is off afterwards."""
        if not self.is_running():
            raise BoardError(f"cannot cut the power of board {self.name}: it is not running")
        self.slot.disk.photograph()
        self.kill_hard()
        self.slot.disk.become_photograph()

    def destroy(self) -> None:
        """Take away everything this board made on the host."""
        for way in self._forwards:
            way.close()
        slots.release(self.slot)
        self._reap()

    def traces(self) -> list[str]:
        """What of this board is on the host; nothing after `destroy`."""
        record = self.slot.record()
        reused = record is not None and record.access_folder != self._record.access_folder
        return [] if reused else self.slot.traces()

    def console(self, lines: int = LOG_LINES) -> str:
        """The end of what the board printed on its console."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def __enter__(self) -> Board:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.destroy()

    def _write_identity(self) -> None:
        root = self.slot.disk.root
        (root / "etc/hostname").write_text(f"{self.name}\n")
        (root / "etc/hosts").write_text(f"127.0.0.1 localhost {self.name}\n")
        # Without one, systemd takes this for a first boot and enables every unit it finds.
        (root / "etc/machine-id").write_text(f"{uuid.uuid4().hex}\n")
        self.access.create(root)

    def _wait_until_up(self, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        state = "systemd does not answer"
        while time.monotonic() < deadline:
            if self._nspawn is not None and (status := self._nspawn.poll()) is not None:
                raise self._failure(f"cannot boot board {self.name}: systemd-nspawn ended with status {status}")
            if nspawn.init_pid(self.slot.groups) is not None:
                asked = self.exec(["systemctl", "is-system-running"], timeout_s=10, check=False)
                state = asked.stdout.strip() or state
                if state in UP_STATES:
                    return state
            time.sleep(POLL_S)
        raise self._failure(f"cannot boot board {self.name}: not up within {timeout_s:g} s ({state})")

    def _leave(self, verb: str, timeout_s: float) -> None:
        if self.is_running():
            self.exec(["systemctl", verb], check=False)  # the connection may end before the answer
            self.wait_until_off(timeout_s=timeout_s)

    def _reap(self) -> None:
        if self._nspawn is not None:
            self._nspawn.wait(timeout=10)
            self._nspawn = None

    def _failure(self, sentence: str) -> BoardError:
        return BoardError(f"{sentence}\n--- the end of its console:\n{self.console()}")


if __name__ == "__main__":
    from tests.device.command import main

    sys.exit(main())

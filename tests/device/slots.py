"""Which boards exist on this host: one numbered slot each, from which every name in the kernel is derived.

A slot is a folder below WORK holding the board's disk, keys and log, and a record of whose board it is. The record of a
board that must not outlive its process names that process; when it has died, the next board that is made anywhere on
the host takes away what it left. So a killed test run leaves nothing for longer than until the next one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.device.disk import Disk, remove_folder
from tests.device.host import locked, mounts_below
from tests.device.network import Network
from tests.device.nspawn import ControlGroups, init_pid
from tests.device.process import BoardError, holds_within

WORK = Path("/var/tmp/avocado-boards")
SLOTS = 128
NSPAWN_FOLDERS = Path("/run/systemd/nspawn")


@dataclass(frozen=True, slots=True)
class Owner:
    """A process, told apart from a later one with the same number by its start time."""

    pid: int
    started: int

    def lives(self) -> bool:
        """Whether that process is still there."""
        return _start_time(self.pid) == self.started


@dataclass(frozen=True, slots=True)
class Record:
    """Whose board a slot holds. `owner` is None for a board that stays until somebody takes it down."""

    name: str
    tree: str
    owner: Owner | None

    @property
    def access_folder(self) -> Path:
        """Where the work tree keeps what is needed to reach the board."""
        return Path(self.tree) / "build/board" / self.name


@dataclass(frozen=True, slots=True)
class Slot:
    """One place for a board on this host."""

    number: int

    @property
    def folder(self) -> Path:
        """Everything of this board that lies on the host's disk."""
        return WORK / str(self.number)

    @property
    def disk(self) -> Disk:
        """The board's disk."""
        return Disk(self.folder)

    @property
    def network(self) -> Network:
        """The board's network."""
        return Network(self.number)

    @property
    def groups(self) -> ControlGroups:
        """The board's control groups."""
        return ControlGroups(f"avb{self.number}")

    def record(self) -> Record | None:
        """Whose board this is; None when the slot is free or was left half made."""
        try:
            found = json.loads(self._record_file.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        owner = Owner(**found["owner"]) if found["owner"] else None
        return Record(name=found["name"], tree=found["tree"], owner=owner)

    def write_record(self, record: Record) -> None:
        """Say whose board this is."""
        self._record_file.write_text(json.dumps(asdict(record)))

    def stop(self) -> None:
        """End the board's processes as a power failure would; fine when none runs."""
        if (init := init_pid(self.groups)) is not None:
            os.kill(init, 9)
            if holds_within(lambda: not self.groups.pids(), timeout_s=5):
                return
        self.groups.kill()
        if not holds_within(lambda: not self.groups.pids(), timeout_s=20):
            raise BoardError(f"cannot stop the board in slot {self.number}: processes {self.groups.pids()} do not end")

    def clear(self) -> None:
        """Take away everything this slot has in the kernel and on the disk, whatever state it is in.

        The caller holds the lock, so that nobody takes the number while its names are still in use.
        """
        self.stop()
        self.groups.remove()
        self.network.down()
        if (record := self.record()) is not None:
            shutil.rmtree(record.access_folder, ignore_errors=True)
        remove_folder(self.folder)
        for folder in NSPAWN_FOLDERS.glob(f"*/{self.groups.name}"):
            folder.rmdir()  # nspawn leaves these where /run is not a tmpfs
        if not holds_within(lambda: not self.traces(), timeout_s=10):
            raise BoardError(f"cannot clear board slot {self.number}: {', '.join(self.traces())} remains")

    def traces(self) -> list[str]:
        """What of this slot is left on the host."""
        return [
            *(f"process {pid}" for pid in self.groups.pids()),
            *self.groups.traces(),
            *self.network.traces(),
            *(f"mount {point}" for point in mounts_below(self.folder)),
            *(f"loop device {loop}" for loop in self.disk.loop_devices()),
            *([f"folder {self.folder}"] if self.folder.exists() else []),
        ]

    @property
    def _record_file(self) -> Path:
        return self.folder / "board.json"


def allocate(record: Record) -> Slot:
    """Take a free slot for a new board, and clear the ones whose owner has died on the way."""
    with locked(WORK / "lock"):
        clear_abandoned()
        for number in range(SLOTS):
            slot = Slot(number)
            if slot.folder.exists():
                continue
            slot.clear()  # names in the kernel may have outlived the folder
            slot.folder.mkdir(mode=0o700)
            slot.write_record(record)
            return slot
    raise BoardError(f"cannot make a board: all {SLOTS} slots in {WORK} are taken")


def release(slot: Slot) -> None:
    """Clear a slot and give its number back."""
    with locked(WORK / "lock"):
        slot.clear()


def find(name: str, tree: Path) -> Slot | None:
    """The slot of the board `name` of the work tree `tree`."""
    for slot in taken():
        record = slot.record()
        if record is not None and (record.name, record.tree) == (name, str(tree)):
            return slot
    return None


def taken() -> Iterator[Slot]:
    """Every slot that has a folder."""
    for folder in sorted(WORK.glob("[0-9]*")):
        yield Slot(int(folder.name))


def clear_abandoned() -> None:
    """Clear each slot whose owner has died, or that has no readable record. The caller holds the lock."""
    for slot in list(taken()):
        record = slot.record()
        if record is None or (record.owner is not None and not record.owner.lives()):
            slot.clear()


def this_process() -> Owner:
    """The owner for a board that must not outlive the running process."""
    return Owner(os.getpid(), _start_time(os.getpid()))


def _start_time(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:  # no such process
        return -1

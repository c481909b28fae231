"""`python -m tests.hostile.refusing_disk FOLDER full|read-only`: what the agent says of a disk that takes nothing.

FOLDER becomes a disk of its own, which only this process sees and which ends with it. Prints an error for each thing
that was tried, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.boot import BootHalf
from agent.contract.errors import OperationError
from agent.observe import Disk
from agent.ports.files import FileStore, write_durably
from agent.ports.overlay_reload import ReloadOverlay
from agent.ports.runtimes import FileRuntimes
from agent.publish import StatusKeeper
from agent.transfer import forget_transfer
from agent.trust_state import copy_sound, keep_documents, scratch
from tests.change.fake_disk import FakeImages, FakeIndexer, FakeRuntimes, FakeStore
from tests.change.fakes import FakeOverlay, FakeUnits
from tests.change.stories import R0, R1, board

IMAGE = R1.extensions[0].image_id


class NoUnits:
    """systemd with no mount of ours, which makes every one that it is asked for."""

    def loaded_like(self, pattern: str) -> list[str]:
        return []

    def bind_read_only(self, what: str, where: str, timeout_s: float) -> None:
        pass


def prepare(disk: Path) -> None:
    """What is there before the disk takes nothing any more."""
    (disk / "work/root_history").mkdir(parents=True)
    store = FileStore(disk)
    part = store.part(IMAGE)
    part.write_bytes(b"half")
    (disk / "images" / f"{IMAGE}.raw").write_bytes(b"image")
    runtimes = FileRuntimes(disk)
    for manifest in (R0, R1):
        runtimes.stage(manifest)
    runtimes.activate(R1.id, None)
    (disk / f"runtimes/{R1.id}/confext").rename(disk / "elsewhere")


def scratched() -> None:
    with scratch("avocado-test-"):
        pass


def boot_half(disk: Path) -> None:
    world = board(R1)
    memory = Disk(FakeStore(world), FakeRuntimes(world), FakeImages(world))
    half = BootHalf(memory, FakeOverlay(world), FakeUnits(world), FakeIndexer(world), disk / "boot-half.json")
    [problem] = half.run(start_timeout_s=1, command_timeout_s=1)
    raise OperationError.from_dict({"code": problem.code, "message": problem.message, "remedy": problem.remedy})


def published(disk: Path) -> None:
    document: Any = {"schema": 1}

    async def nobody() -> None:
        return None

    keeper = StatusKeeper(lambda inference: document, nobody, disk, 5.0)
    assert asyncio.run(keeper.refresh()) is document


def cases(disk: Path) -> dict[str, Callable[[], object]]:
    """What is tried, by what it is for."""
    reload: Any = NoUnits()
    store = FileStore(disk)
    return {
        "a file": lambda: write_durably(disk / "changes/1.json", b"{}"),
        "the accepted documents": lambda: keep_documents(disk / "work", disk / "cache", write_durably),
        "a copy of them": lambda: copy_sound(disk / "nothing", disk / "images"),
        "a scratch folder": scratched,
        "a trial by reload": lambda: ReloadOverlay(reload, disk).show(disk / "runtimes" / R0.id, time.monotonic() + 9),
        "the boot's marker": lambda: boot_half(disk),
        "the status": lambda: published(disk),
        "a begun transfer": lambda: forget_transfer(store.part(IMAGE)),
        "an image": lambda: store.remove_image(IMAGE),
    }


def main(disk: Path, how: str) -> dict[str, Any]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,nr_inodes=200", "tmpfs", str(disk)], check=True)
    prepare(disk)
    tempfile.tempdir = os.environ["TMPDIR"] = str(disk)
    if how == "full":
        while True:
            try:
                (disk / f"filler-{time.monotonic_ns()}").touch()
            except OSError:
                break
    else:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    found: dict[str, Any] = {}
    for name, case in cases(disk).items():
        try:
            case()
        except OperationError as error:
            found[name] = error.as_dict()
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))

"""Runs on the board, with its Python alone: one JSON line every few seconds of what the agent, the pose service and the
board hold. Everything is counted from outside the processes it is about.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

UNITS = {"agent": "avocadod.service", "service": "pose.service"}
IMAGES = Path("/var/lib/avocado/images")


def unit(name: str) -> dict[str, float]:
    """Memory (resident, summed), descriptors, threads and processes of a unit's main process and all below it."""
    shown = subprocess.run(["systemctl", "show", "-P", "MainPID", name], stdout=subprocess.PIPE, text=True, check=True)
    main = int(shown.stdout)
    counted = {"main_pid": main, "memory_kib": 0, "descriptors": 0, "threads": 0, "processes": 0}
    for pid in _family(main) if main else ():
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        except OSError:
            continue  # it has ended since it was listed
        values = dict(line.split(":", 1) for line in status.splitlines())
        counted["memory_kib"] += int(values.get("VmRSS", "0 kB").split()[0])
        counted["threads"] += int(values["Threads"])
        counted["descriptors"] += descriptors
        counted["processes"] += 1
    return counted


def board() -> dict[str, float]:
    """What the whole board holds."""
    ours = {image.name for image in IMAGES.iterdir()}
    loops = 0
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            loops += Path(backing.read_text().strip()).name in ours
        except OSError:
            continue  # detached since it was listed
    return {
        "mounts": len(Path("/proc/1/mountinfo").read_text().splitlines()),
        "loops": loops,
        "dev_shm": len(list(Path("/dev/shm").iterdir())),  # noqa: S108 - counted, not used
        "images": len(ours),
        "init_descriptors": len(list(Path("/proc/1/fd").iterdir())),
        "init_memory_kib": _resident_kib(1),
    }


def _resident_kib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4


def _family(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from _family(int(child))


def main(every_s: float) -> None:
    """Until standard input ends."""
    while True:
        sample = {key: unit(name) for key, name in UNITS.items()}
        print(json.dumps({"at": time.monotonic(), **sample, "board": board()}), flush=True)
        if select.select([sys.stdin], [], [], every_s)[0]:
            return


if __name__ == "__main__":
    main(float(sys.argv[1]))

"""How long a frame waits when the NPU hangs: from the missed soft deadline to the CPU's pose for that same frame.

Two loads: back to back (every frame meets a hang as soon as the NPU serves again) and at a camera's rate. Each fallback
pose is compared with an inference of the same frame in this process, which also gives the yardstick: one CPU inference,
measured at the same pace. Writes build/bench/fallback.json and prints one table.

What is measured is the supervision. It is driven over its own socket, without web, bus and asyncio, by a client at the
supervisor's real-time priority, so that the wait for the client's turn is not counted. Back to back, processes that run
only when nobody else wants to keep the processors from halting: how long a halted one takes to come back is the host's
matter or, on a board, that of cpuidle. `--halting` leaves those processes out; at the camera's rate there are none.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from inference import litert
from inference.accelerator import load_accelerator
from inference.frames import SIDE, FrameRing
from inference.model import load_golden_frame, load_model
from inference.orders import Places, orders_for
from inference.policy import Backend
from inference.processes import python_command
from inference.records import NOTE_LIMIT, Ask, Kind, Reply, kind_of, pack_note, unpack_note
from inference.worker import PoseModel

ROOT = Path(__file__).parents[1]
SOFT_MS = 20.0
LIMIT_FACTOR = 1.5
LIMIT_EXTRA_MS = 1.0
PRIORITY = 10
_SPINNER = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile os.getppid() == {parent}: pass"


@dataclass(frozen=True, slots=True)
class Figures:
    """One load's result; milliseconds."""

    hangs: int
    frames: int
    unanswered: int
    wrong_poses: int
    healthy_workers_killed: int
    killed_for: str
    inference_p50: float
    fallback_p50: float
    fallback_p95: float
    fallback_p99: float
    fallback_max: float
    limit: float
    load_average: float


class Bench:
    """A supervisor with the simulated NPU, driven synchronously."""

    def __init__(self, model_dir: Path, folder: Path) -> None:
        model = load_model(model_dir)
        golden = load_golden_frame(model)
        # Eight different pictures: a pose that belongs to another frame must not look right.
        self.pictures = [np.ascontiguousarray(np.roll(golden, 4 * shift, axis=1)) for shift in range(8)]
        names = model.document.output.names
        heads = (names.center, names.regress, names.heatmap, names.offset)
        backend = litert.prepare(model.file_for("cpu"), None, 1, model.document.input.name, heads, SIDE)
        self.local = PoseModel(model, "cpu", backend)
        self.expected = [self.local.infer(picture[np.newaxis]).tobytes() for picture in self.pictures]
        self.control = folder / "control"
        (folder / "node").touch()
        self.inject("ok")
        options = {"node": str(folder / "node"), "control": str(self.control), "ops": "ADD", "max_nodes": "1"}
        overrides = {
            "nodes": [],
            "delegate": {"path": str(ROOT / "build/simnpu/libsimnpu.so"), "options": options},
            "deadlines": {"soft_ms_floor": SOFT_MS, "soft_ms_ceiling": SOFT_MS, "first_invoke_s": 1.0},
            "recovery": {"golden_passes": 1, "backoff_s": 0.0, "backoff_max_s": 0.0, "give_up_after": 1 << 30},
        }
        places = Places(folder / "cache", folder / "reset-request", folder / "reset-answer")
        self.ring = FrameRing.create()
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptors = [theirs.fileno(), self.ring.fd]
            command = python_command("inference.supervisor", *map(str, descriptors), str(os.getpid()))
            self.process = subprocess.Popen(command, pass_fds=descriptors, stderr=subprocess.DEVNULL)
        self.link.settimeout(15)
        self.link.send(pack_note(orders_for(load_accelerator("virtual", overrides), model_dir, places).as_dict()))
        self.backend = Backend.NONE
        self.killed: Counter[str] = Counter()
        self.sequence = 0

    def inject(self, mode: str) -> None:
        """Set the simulated NPU's mode in one step."""
        fresh = self.control.with_suffix(".new")
        fresh.write_text(mode)
        fresh.rename(self.control)

    def frame(self) -> tuple[Reply | None, float, bool]:
        """Ask for one frame: the reply, the milliseconds it took, and whether the pose is this frame's."""
        self.sequence += 1
        slot = self.sequence % len(self.pictures)
        self.ring.write(slot, self.pictures[slot].data.cast("B"))
        began = time.monotonic()
        self.link.send(Ask(slot, self.sequence).pack())
        reply = self._reply(self.sequence)
        taken_ms = (time.monotonic() - began) * 1000
        if reply is None:
            return None, taken_ms, False
        # The NPU's own rounding differs; only the CPU's answers can be compared bit for bit.
        right = reply.backend is not Backend.CPU or reply.pose == self.expected[slot]
        return reply, taken_ms, right

    def until_npu(self, pause_s: float) -> int:
        """Frames until the NPU answers; how many were asked."""
        for asked in range(1, 100_000):
            reply, _, _ = self.frame()
            if reply is not None and reply.backend is Backend.NPU:
                return asked
            time.sleep(pause_s)
        raise RuntimeError("the NPU did not come back")

    def local_p50(self, pace_s: float, rounds: int) -> float:
        """One CPU inference in this process at this pace, milliseconds."""
        taken = []
        for index in range(rounds):
            picture = self.pictures[index % len(self.pictures)][np.newaxis]
            began = time.monotonic()
            self.local.infer(picture)
            taken.append((time.monotonic() - began) * 1000)
            time.sleep(pace_s)
        return statistics.median(taken)

    def hangs(self, count: int, pace_s: float) -> Figures:
        """Meet `count` hangs; see the module."""
        inference_ms = self.local_p50(pace_s, 200 if not pace_s else 60)
        self.until_npu(0.002)
        asked = unanswered = wrong = 0
        fallbacks: list[float] = []
        before = Counter(self.killed)
        while len(fallbacks) < count:
            self.inject("hang")
            reply, taken_ms, right = self.frame()
            self.inject("ok")
            asked += 1
            if reply is None:
                unanswered += 1
            elif reply.backend is Backend.CPU:
                fallbacks.append(taken_ms - SOFT_MS)
            wrong += not right
            asked += self.until_npu(max(pace_s, 0.001))
            time.sleep(pace_s)
        ordered = sorted(fallbacks)
        killed = self.killed - before
        return Figures(
            hangs=count,
            frames=asked,
            unanswered=unanswered,
            wrong_poses=wrong,
            # A golden frame in flight can hide a hang from the frame that was to meet it: fewer kills than hangs.
            healthy_workers_killed=max(0, sum(killed.values()) - count),
            killed_for=" ".join(f"{reason}:{times}" for reason, times in sorted(killed.items())),
            inference_p50=round(inference_ms, 3),
            fallback_p50=_part(ordered, 0.50),
            fallback_p95=_part(ordered, 0.95),
            fallback_p99=_part(ordered, 0.99),
            fallback_max=_part(ordered, 1.0),
            limit=round(LIMIT_FACTOR * inference_ms + LIMIT_EXTRA_MS, 3),
            load_average=os.getloadavg()[0],
        )

    def close(self) -> None:
        """End the supervisor."""
        self.link.close()
        self.process.wait(5)
        self.ring.close()

    def _reply(self, sequence: int) -> Reply | None:
        while True:
            raw = self.link.recv(NOTE_LIMIT)
            if kind_of(raw) is Kind.POSE:
                reply = Reply.unpack(raw)
                if reply.sequence == sequence:
                    return reply
                continue
            note = unpack_note(raw)
            if note["event"] == "log" and note["phase"] == "ending":
                self.killed[note["reason"]] += 1
            if note["event"] == "refused" and note["sequence"] == sequence:
                return None


def _part(ordered: Sequence[float], part: float) -> float:
    return round(ordered[min(len(ordered) - 1, round(part * (len(ordered) - 1)))], 3)


@contextmanager
def processors_awake() -> Iterator[None]:
    """No processor halts meanwhile; nobody waits for one either."""
    line = [sys.executable, "-I", "-c", _SPINNER.format(parent=os.getpid())]
    spinners = [subprocess.Popen(line) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def main() -> int:
    """0 when every frame was answered, every pose right and the limit kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "build/models/movenet-lightning")
    parser.add_argument("--saturated", type=int, default=1000, metavar="HANGS")
    parser.add_argument("--paced", type=int, default=300, metavar="HANGS")
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench/fallback.json")
    parser.add_argument("--halting", action="store_true", help="let processors halt in the load back to back, too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="avocado-bench-") as folder:
        bench = Bench(arguments.model, Path(folder))
        try:
            # Not before the supervisor is there: what it starts must not inherit this.
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
            with nullcontext() if arguments.halting else processors_awake():
                saturated = bench.hangs(arguments.saturated, 0.0)
            paced = bench.hangs(arguments.paced, 1 / 30)
        finally:
            bench.close()
    figures = {"saturated": asdict(saturated), "paced_30_fps": asdict(paced), "soft_ms": SOFT_MS}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"{'':24}{'back to back':>18}{'30 fps':>18}")
    for name, value in asdict(saturated).items():
        print(f"{name:24}{value:>18}{asdict(paced)[name]:>18}")
    clean = all(load.unanswered == load.wrong_poses == load.healthy_workers_killed == 0 for load in (saturated, paced))
    kept = saturated.fallback_p99 <= saturated.limit and paced.fallback_p95 <= paced.limit
    return 0 if clean and kept else 1


if __name__ == "__main__":
    sys.exit(main())

"""What supervision costs: the supervised NPU against the same worker loop in one process, in interleaved rounds.

Beside both runs the same load as in the service, in a process of its own: 30 annotated JPEGs a second and a status
document for each over a socket. Latency is taken with one frame in flight, throughput with two for the supervised side
(a camera's next frame is there while the last one is computed) and back to back for the other. Prints both, and where
the time of a whole frame goes. Writes build/bench/supervision.json.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from inference import litert
from inference.drawing import annotate
from inference.frames import SIDE, FrameRing
from inference.link import SupervisorLink, SupervisorSettings
from inference.model import load_centre_weight, load_golden_frame, load_model
from inference.policy import Backend, Reason
from inference.pose import decode_heads, initial_crop, to_frame
from inference.processes import die_with_parent
from inference.status import Sample
from inference.tensors import cut
from inference.worker import PoseModel

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "build/simnpu/libsimnpu.so"
MIN_THROUGHPUT = 0.97
MAX_ADDED_MS = 0.3
_LOAD_FPS = 30


def load_beside(arguments: list[str]) -> None:
    """What a browser makes the service do, until the parent ends."""
    die_with_parent(int(arguments[0]))
    picture = np.random.default_rng(1).integers(0, 64, (480, 480, 3), np.uint8)
    points = np.full((17, 3), 240.0, np.float32)
    sample = Sample(1, picture, points, Backend.NPU, Reason.OK, False, 2.0, 0.0)
    ours, theirs = socket.socketpair()
    due = time.monotonic()
    while True:
        ours.sendall(json.dumps({"jpeg_bytes": len(annotate(sample, 80)), "points": points.tolist()}).encode())
        theirs.recv(1 << 16)
        due += 1 / _LOAD_FPS
        time.sleep(max(0.0, due - time.monotonic()))


class Alone:
    """The worker's loop in this process: the frame is copied, inferred and decoded, and nobody watches."""

    def __init__(self, model_dir: Path, folder: Path) -> None:
        model = load_model(model_dir)
        names = model.document.output.names
        self.heads = (names.center, names.regress, names.heatmap, names.offset)
        options = {"node": str(folder / "node-alone"), "ops": "ADD", "max_nodes": "1"}
        (folder / "node-alone").touch()
        delegate = litert.create_delegate(str(LIBRARY), options)
        file = model.file_for("virtual")
        self.backend = litert.prepare(file, delegate, 1, model.document.input.name, self.heads, SIDE)
        self.pose_model = PoseModel(model, "virtual", self.backend)
        self.weight = load_centre_weight(model)
        self.ring = FrameRing.create()
        self.slot = np.frombuffer(self.ring.view(0), np.uint8).reshape(1, SIDE, SIDE, 3)

    def infer(self, frame: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """One frame."""
        self.ring.write(0, frame.data.cast("B"))
        self.pose_model.infer(self.slot)


def alone_round(alone: Alone, frame: Any, count: int) -> tuple[float, float]:
    """Median latency in ms, and frames a second."""
    taken = []
    began = time.perf_counter()
    for _ in range(count):
        start = time.perf_counter()
        alone.infer(frame)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1000, count / (time.perf_counter() - began)


async def supervised_round(link: SupervisorLink, frame: Any, count: int) -> tuple[float, float, float, int]:
    """Median latency in ms and frames a second one by one, frames a second two at a time, and fallbacks."""
    before = link.state.fallbacks
    taken = []
    began = time.perf_counter()
    for _ in range(count):
        start = time.perf_counter()
        await link.infer(frame)
        taken.append(time.perf_counter() - start)
    single = count / (time.perf_counter() - began)

    async def half() -> None:
        for _ in range(count // 2):
            await link.infer(frame)

    began = time.perf_counter()
    await asyncio.gather(half(), half())
    double = count / (time.perf_counter() - began)
    await link.next_state()
    return statistics.median(taken) * 1000, single, double, link.state.fallbacks - before


async def compare(model_dir: Path, folder: Path, rounds: int, count: int) -> dict[str, Any]:
    """The interleaved rounds."""
    alone = Alone(model_dir, folder)
    frame = load_golden_frame(load_model(model_dir))
    (folder / "node").touch()
    options = {"node": str(folder / "node"), "control": str(folder / "control"), "ops": "ADD", "max_nodes": "1"}
    overrides = {"nodes": [], "delegate": {"path": str(LIBRARY), "options": options}}
    link = await SupervisorLink.start(SupervisorSettings(model_dir, "virtual", folder, overrides))
    rows = []
    try:
        await link.wait_serving(30, backend=Backend.NPU)
        alone_round(alone, frame, 30)
        await supervised_round(link, frame, 30)
        for number in range(rounds):
            # Neither side always has the quieter half of a round.
            if number % 2:
                single = alone_round(alone, frame, count)
                watched = await supervised_round(link, frame, count)
            else:
                watched = await supervised_round(link, frame, count)
                single = alone_round(alone, frame, count)
            rows.append((*single, *watched))
    finally:
        await link.close()
    return {
        "rounds": rounds,
        "frames_a_round": count,
        "alone_ms": _median(row[0] for row in rows),
        "supervised_ms": _median(row[2] for row in rows),
        "added_ms": _median(row[2] - row[0] for row in rows),
        "throughput_one_in_flight": _median(row[3] / row[1] for row in rows),
        "throughput_two_in_flight": _median(row[4] / row[1] for row in rows),
        "throughput_least": round(min(row[4] / row[1] for row in rows), 3),
        "fallbacks": sum(row[5] for row in rows),
        "budget_ms": budget(alone, frame),
    }


def budget(alone: Alone, frame: Any) -> dict[str, float]:
    """Where the time of one camera frame goes; medians."""
    random_picture = Image.fromarray(np.kron(frame, np.ones((4, 4, 1), np.uint8))[:480, :640])
    jpeg = io.BytesIO()
    random_picture.save(jpeg, "JPEG", quality=85)
    picture = np.asarray(random_picture)
    crop = initial_crop((picture.shape[1], picture.shape[0]))
    outputs = alone.backend.infer(alone.slot)
    heads = [outputs[name] for name in alone.heads]
    points = to_frame(decode_heads(*heads, alone.weight), crop)
    sample = Sample(1, picture, points, Backend.NPU, Reason.OK, False, 2.0, 0.0)
    return {
        "decode 640x480 JPEG": _timed(lambda: np.asarray(Image.open(io.BytesIO(jpeg.getvalue())).convert("RGB"))),
        "crop to 192x192": _timed(lambda: cut(picture, crop, SIDE)),
        "copy into the ring": _timed(lambda: alone.ring.write(0, frame.data.cast("B"))),
        "invoke": _timed(lambda: alone.backend.infer(alone.slot)),
        "decode the pose": _timed(lambda: decode_heads(*heads, alone.weight)),
        "draw and encode": _timed(lambda: annotate(sample, 80)),
    }


def _timed(work: Callable[[], Any], rounds: int = 60) -> float:
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return round(statistics.median(taken) * 1000, 3)


def _median(values: Any) -> float:
    return round(statistics.median(values), 3)


def main() -> int:
    """0 when both limits are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=ROOT / "build/models/movenet-lightning")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--frames", type=int, default=60, metavar="PER_ROUND")
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench/supervision.json")
    arguments = parser.parse_args()
    beside = subprocess.Popen(_load_command(), cwd=ROOT)
    try:
        with tempfile.TemporaryDirectory(prefix="avocado-bench-") as folder:
            found = asyncio.run(compare(arguments.model, Path(folder), arguments.rounds, arguments.frames))
    finally:
        beside.kill()
        beside.wait()
    found["load_average"] = os.getloadavg()[0]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    parts = found.pop("budget_ms")
    for name, value in found.items():
        print(f"{name:28}{value!s:>16}")
    print("\none frame, ms" + "".join(f"\n  {name:26}{value:>10.3f}" for name, value in parts.items()))
    print(f"  {'supervision (median added)':26}{found['added_ms']:>10.3f}")
    kept = found["throughput_two_in_flight"] >= MIN_THROUGHPUT and found["added_ms"] <= MAX_ADDED_MS
    return 0 if kept else 1


def _load_command() -> list[str]:
    code = "import sys; from bench.supervision import load_beside; load_beside(sys.argv[1:])"
    return [sys.executable, "-c", code, str(os.getpid())]


if __name__ == "__main__":
    sys.exit(main())

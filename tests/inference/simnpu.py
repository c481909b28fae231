"""The simulated NPU with whatever options a test wants, in this process or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from inference import litert
from tests.networks import SIDE

ROOT = Path(__file__).parents[2]
ALL_OPERATORS = "ADD,CONV_2D,DEPTHWISE_CONV_2D,LOGISTIC,QUANTIZE,RESHAPE,RESIZE_BILINEAR"


def on_npu(library: Path, file: Path, size: int, outputs: tuple[str, ...], **options: str) -> litert.LiteRt:
    """A file prepared on it; by default it claims all it can."""
    delegate = litert.create_delegate(str(library), {"ops": ALL_OPERATORS, **options})
    return litert.prepare(file, delegate, 1, "image", outputs, size)


CHILD = """
import sys, time
import numpy as np
from pathlib import Path
from inference import litert
library, model, side, *pairs = sys.argv[1:]
side = int(side)
say = lambda word: print(word, flush=True)
options = dict(pair.split("=", 1) for pair in pairs)
try:
    delegate = litert.create_delegate(library, options)
    say("created")
    npu = litert.prepare(Path(model), delegate, 1, "image", ("scores",), side)
    say("loaded")
    frame = np.full((1, side, side, 3), 77, np.uint8)
    for number in range(1, 4):
        begun = time.monotonic()
        scores = npu.infer(frame)["scores"]
        say(f"frame {number} {round(1000 * (time.monotonic() - begun))} ms {float(scores.sum()):.3f}")
except (litert.InferenceError, RuntimeError, ValueError) as error:
    say(f"{type(error).__name__}: {str(error).splitlines()[0]}")
"""


class Child:
    """A process that loads the model on the simulated NPU and runs three frames, saying how far it got."""

    def __init__(self, library: Path, model: Path, **options: str) -> None:
        pairs = [f"{key}={value}" for key, value in {"ops": ALL_OPERATORS, **options}.items()]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(library), str(model), str(SIDE), *pairs],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(5)
        assert self.process.stdout
        self.process.stdout.close()

    def wait_for(self, word: str) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.startswith(word):
                return
        raise AssertionError(f"no '{word}' in {self.lines}")

    def finish(self) -> list[str]:
        out, _ = self.process.communicate(timeout=20)
        return self.lines + out.split("\n")[:-1]

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

"""A supervisor with the real runtime and the simulated NPU, faults at hand, and proof that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.link import Answer, SupervisorLink, SupervisorSettings
from inference.model import load_golden_frame, load_model
from inference.policy import Backend, Reason
from inference.pose import golden_oks

ROOT = Path(__file__).parents[2]
MODEL = Path(os.environ.get("AVOCADO_TEST_MODEL", ROOT / "build/models/movenet-lightning"))
LIBRARY = ROOT / "build/simnpu/libsimnpu.so"
MARK = "AVOCADO_TEST_RIG"
WAIT_S = 20.0

# Deadlines a busy machine with two cores still meets, and a rhythm that makes a test short. A runtime with slower
# kernels needs more.
SOFT_MS = float(os.environ.get("AVOCADO_TEST_SOFT_MS", "60"))
QUICK: Mapping[str, Any] = {
    "deadlines": {"create_s": 3.0, "prepare_s": 3.0, "soft_ms_floor": SOFT_MS, "soft_ms_ceiling": SOFT_MS * 4 / 3},
    "recovery": {
        "golden_passes": 2,
        "golden_every_s": 0.15,
        "slow_limit": 3,
        "backoff_s": 0.02,
        "backoff_max_s": 0.1,
        "give_up_after": 1000,
    },
}


@dataclass
class Rig:
    """One run directory with its device node, its fault switch and its supervisor."""

    folder: Path
    model_dir: Path = MODEL
    switches: list[tuple[Backend, Backend, Reason]] = field(default_factory=list)

    @property
    def node(self) -> Path:
        """The device node; locks work on any file."""
        return self.folder / "simnpu0"

    def inject(self, mode: str) -> None:
        """Make the simulated NPU behave so from its next look on."""
        fresh = self.folder / "control.new"
        fresh.write_text(mode)
        fresh.rename(self.folder / "control")

    def settings(self, **changes: Any) -> SupervisorSettings:
        """The virtual profile, with this rig's paths and quick deadlines."""
        answer = changes.pop("reset_answer", self.folder / "reset-answer")
        options = {"node": str(self.node), "control": str(self.folder / "control"), **changes.pop("options", {})}
        overrides: dict[str, Any] = {**QUICK, "nodes": [str(self.node)]}
        overrides["delegate"] = {"path": str(LIBRARY), "options": options}
        for key, value in changes.items():
            inner = overrides.get(key)
            overrides[key] = {**inner, **value} if isinstance(inner, Mapping) else value
        return SupervisorSettings(self.model_dir, "virtual", self.folder, overrides, reset_answer=answer)

    @contextlib.asynccontextmanager
    async def running(self, *, wait: bool = True, **changes: Any) -> AsyncIterator[SupervisorLink]:
        """A started link whose NPU serves; afterwards, no process and no descriptor of it is left."""
        descriptors = open_descriptors()
        link = await SupervisorLink.start(self.settings(**changes))
        link.on_backend_changed(lambda before, after, reason: self.switches.append((before, after, reason)))
        try:
            if wait:
                await link.wait_serving(WAIT_S, backend=Backend.NPU)
            yield link
        finally:
            await link.close()
        await no_process_left()
        assert open_descriptors() <= descriptors


class Camera:
    """Asks for the golden frame again and again, and keeps every answer."""

    def __init__(self, link: SupervisorLink, model_dir: Path = MODEL) -> None:
        model = load_model(model_dir)
        self.frame = load_golden_frame(model)
        self._golden = np.array(model.golden_pose("cpu"), np.float32)
        self._link = link
        self.answers: list[Answer] = []

    async def until(self, condition: Callable[[Answer], bool], *, pause_s: float = 0.005) -> Answer:
        """Frames at a camera's pace until an answer is as wanted."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            answer = await self._link.infer(self.frame)
            self.answers.append(answer)
            if condition(answer):
                return answer
            await asyncio.sleep(pause_s)
        seen = {(answer.backend.value, answer.reason.value) for answer in self.answers[-50:]}
        raise AssertionError(f"no such answer within {WAIT_S} s; the last ones were {seen}")

    def oks(self, answer: Answer) -> float:
        """How near an answer is to the golden pose."""
        return golden_oks(answer.pose, self._golden)


def require() -> None:
    """Skip, loudly, where the model or the simulated NPU has not been made."""
    if not MODEL.joinpath("model.json").exists():
        pytest.skip("build/models/movenet-lightning is missing: run `make model`")
    if not LIBRARY.exists():
        pytest.skip("build/simnpu/libsimnpu.so is missing: run `make setup`")


def marked_processes() -> dict[int, str]:
    """Every process, but this one, that was started below the current test, with its state."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if mark in folder.joinpath("environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = folder.joinpath("stat").read_text().rpartition(")")[2].split()[0]
    return found


async def no_process_left(timeout_s: float = 5.0) -> None:
    """Wait until nothing that the test started lives."""
    deadline = time.monotonic() + timeout_s
    while left := marked_processes():
        assert time.monotonic() < deadline, f"left behind: {left}"
        await asyncio.sleep(0.01)


def open_descriptors(pid: int | str = "self") -> int:
    """How many descriptors a process holds."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def new_mark() -> str:
    """A value that only the processes of one test carry."""
    return uuid.uuid4().hex

"""Who else holds the NPU is told in words that can be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agent.change.steps.release_npu import ReleaseNpu
from agent.ports.protocols import Holder, Process
from tests.change.fakes import FakeClock
from tests.change.world import World


@dataclass
class Compositor:
    """Holds the node, and is not ours."""

    def holders(self, nodes: Any, units: Any) -> list[Holder]:
        return [Holder(Process(313, "weston", "S", "ep_poll", "weston.service"), nodes[0], ours=False)]


@dataclass
class Said:
    warnings: list[str]

    def progress(self, done: int, total: int) -> None: ...
    def stop_if_cancelled(self) -> None: ...
    def fact(self, name: str, value: Any) -> None: ...
    def warn(self, message: str) -> None:
        self.warnings.append(message)


def test_a_process_of_somebody_else_is_named_and_left_alone() -> None:
    step, said = ReleaseNpu(Compositor(), None, FakeClock(World())), Said([])  # type: ignore[arg-type]
    inputs = {"nodes": ["/dev/galcore"], "settle_s": 0.0, "contexts": 1}
    step.do(inputs, {"units": ["pose.service"]}, said)
    assert said.warnings == ["left alone, not ours: pid 313 (weston, state S in ep_poll) holds /dev/galcore"]

"""Holds every step of a preparation to the float model's answers on held-out pictures.

Pictures and answers are kept while they are few; beyond that they are read, and answered by the float model, anew for
each step, so that memory does not grow with the number of held-out pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from inference.errors import InferenceError
from inference.prepare.calibrate import Pictures
from inference.prepare.contract import Contract
from inference.prepare.evaluate import Agreement, require
from inference.prepare.graph import Array, Net
from inference.prepare.pictures import KEPT_BYTES
from inference.prepare.progress import bar
from inference.prepare.run import Runner
from inference.prepare.writer import write_float

Answering = Callable[[Array], Any]


class Judge:
    """The float model's answers to the held-out pictures, and the limits every step is held to."""

    golden: Array

    def __init__(self, net: Net, contract: Contract, pictures: Pictures, limits: Mapping[str, float]) -> None:
        self._contract, self._limits = contract, limits
        self._pictures, self._float = pictures, Runner(write_float(net))
        self._kept: list[Any] | None = []
        self.count = 0
        contract.check_float(net, self._learn())

    def judge(self, step: str, answering: Answering) -> Agreement:
        """Compare, or refuse naming the step."""
        pairs = bar(self._exact(), step, total=self.count)
        found = self._contract.compare((answering(picture), exact) for picture, exact in pairs)
        require(found, self._limits, step)
        return found

    def judge_file(self, step: str, content: bytes) -> None:
        """The same for a file that the CPU can run."""
        runner = Runner(content)
        self.judge(step, lambda picture: self._contract.answer(runner(picture)))

    def _learn(self) -> Iterator[Mapping[str, Array]]:
        """The float model's outputs, whose answers are kept on the way, and the clearest picture as the golden one."""
        clearest, size = -np.inf, 0
        for picture in self._pictures():
            outputs = self._float(picture)
            _require_numbers(outputs)
            answer = self._contract.answer(outputs)
            self.count += 1
            if (clarity := self._contract.clarity(answer)) > clearest:
                clearest, self.golden = clarity, picture
            size += sum(value.nbytes for value in (answer.values() if isinstance(answer, Mapping) else [answer]))
            if self._kept is not None:
                self._kept.append(answer)
            if size > KEPT_BYTES:
                self._kept = None
            yield outputs

    def _exact(self) -> Iterator[tuple[Array, Any]]:
        if self._kept is not None:
            yield from zip(self._pictures(), self._kept, strict=True)
            return
        for picture in self._pictures():
            yield picture, self._contract.answer(self._float(picture))


def _require_numbers(outputs: Mapping[str, Array]) -> None:
    for name, values in outputs.items():
        if not np.isfinite(values).all():
            raise InferenceError(
                f"cannot accept the model: after the step 'float' output '{name}' holds values that are no numbers",
                "check the input range and the model's weights",
            )

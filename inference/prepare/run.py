"""Runs a .tflite held in memory on pictures and gives out named tensors as real values, one picture at a time.

One at a time is what keeps a calibration's memory constant. This is the developer's side, so it uses the runtime whose
wheel also carries the schema; on a board, `inference.litert` is the only door to a runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum

import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from inference.prepare.graph import Array
from inference.tensors import dequantize


class Kernels(StrEnum):
    """Which implementation of the operators runs; int8 results differ between them."""

    FAST = "AUTO"
    REFERENCE = "BUILTIN_REF"


class Runner:
    """One model with its signature bound by name."""

    def __init__(self, content: bytes, kernels: Kernels = Kernels.FAST) -> None:
        self._interpreter = Interpreter(
            model_content=content, num_threads=2, experimental_op_resolver_type=OpResolverType[kernels.value]
        )
        self._run = self._interpreter.get_signature_runner()
        ((self._input, details),) = self._run.get_input_details().items()
        self._dtype = np.dtype(details["dtype"])
        self._outputs = {
            name: (float(found["quantization"][0]), int(found["quantization"][1]))
            for name, found in self._run.get_output_details().items()
        }

    def __call__(self, picture: Array) -> dict[str, Array]:
        """Every output for one picture uint8[height, width, 3], dequantized."""
        values = self._run(**{self._input: picture[None].astype(self._dtype)})
        return {name: dequantize(value, *self._outputs[name]) for name, value in values.items()}

    def over(self, pictures: Iterable[Array]) -> Iterator[Mapping[str, Array]]:
        """The outputs of each picture in turn."""
        for picture in pictures:
            yield self(picture)

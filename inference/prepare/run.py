"""Runs a .tflite held in memory on pictures and gives out named tensors as real values, one picture at a time.

One at a time is what keeps a calibration's memory constant. This is the developer's side, so it uses the runtime whose
wheel also carries the schema; on a board, `inference.litert` is the only door to a runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

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
            model_content=content, num_threads=1, experimental_op_resolver_type=OpResolverType[kernels.value]
        )
        self._run = self._interpreter.get_signature_runner()
        ((self._input, details),) = self._run.get_input_details().items()
        self._dtype = np.dtype(details["dtype"])
        self._outputs = {name: _codes(found) for name, found in self._run.get_output_details().items()}

    def __call__(self, picture: Array) -> dict[str, Array]:
        """Every output for one picture uint8[height, width, 3], dequantized."""
        values = self._run(**{self._input: picture[None].astype(self._dtype)})
        return {name: dequantize(value, *self._outputs[name]) for name, value in values.items()}

    def over(self, pictures: Iterable[Array]) -> Iterator[Mapping[str, Array]]:
        """The outputs of each picture in turn."""
        for picture in pictures:
            yield self(picture)


class Original:
    """A .tflite as somebody else wrote it, with or without a signature; outputs under the names its reader gave."""

    def __init__(self, content: bytes, names: tuple[str, ...], low: float, high: float) -> None:
        self._interpreter = Interpreter(model_content=content, num_threads=1)
        self._interpreter.allocate_tensors()
        (self._input,) = self._interpreter.get_input_details()
        signatures = self._interpreter.get_signature_list()
        if signatures:
            details = self._interpreter.get_signature_runner(next(iter(signatures))).get_output_details()
            self._outputs = {name: details[name] for name in names}
        else:
            self._outputs = dict(zip(names, self._interpreter.get_output_details(), strict=True))
        self._low, self._step = low, (high - low) / 255

    def __call__(self, picture: Array) -> dict[str, Array]:
        """Every output for one picture uint8[height, width, 3], as real values."""
        dtype = np.dtype(self._input["dtype"])
        match dtype.name:
            case "uint8":
                values = picture
            case "int8":
                values = (picture.astype(np.int16) - 128).astype(np.int8)
            case _:
                values = (self._low + picture * self._step).astype(dtype)
        self._interpreter.set_tensor(self._input["index"], values[None])
        self._interpreter.invoke()
        return {
            name: dequantize(self._interpreter.get_tensor(found["index"]), *_codes(found))
            for name, found in self._outputs.items()
        }


def _codes(details: Mapping[str, Any]) -> tuple[float, int]:
    return float(details["quantization"][0]), int(details["quantization"][1])

"""LiteRT, or the tflite_runtime that a board's BSP ships: the only module that imports either.

Outputs are bound by the name in the model's signature, never by position: converters reorder them, and two of
MoveNet's heads have the same shape. Loading a delegate and preparing a graph hold the GIL, and a hung invoke can only
be ended with its process, which is why nothing but a worker calls this.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# What the extension ships comes first; one for a board whose delegate wants its BSP's runtime ships none.
try:
    from ai_edge_litert.interpreter import Interpreter, load_delegate

    RUNTIME = "ai_edge_litert"
except ImportError:
    from tflite_runtime.interpreter import Interpreter, load_delegate

    RUNTIME = "tflite_runtime"

from inference.errors import InferenceError
from inference.tensors import dequantize

RUNTIME_VERSION = str(getattr(sys.modules[RUNTIME], "__version__", ""))
_SCHEMA = "3"
# LiteRT began at this TensorFlow Lite and counts anew; operators are dated by the old count.
_LITERT_BEGAN = "2.17.0"
Array = npt.NDArray[Any]


class DelegateRefusedError(InferenceError):
    """The accelerator's library said no, to being created or to this model."""


class LiteRt:
    """An interpreter with its tensors bound: a `Backend`."""

    def __init__(self, interpreter: Any, input_name: str, outputs: tuple[str, ...], size: int) -> None:
        self._interpreter = interpreter
        runner = interpreter.get_signature_runner()
        self._input = _bound_input(runner.get_input_details(), input_name, size)
        self._outputs = _bound_outputs(runner.get_output_details(), outputs)

    def infer(self, frame: npt.NDArray[np.uint8]) -> Mapping[str, Array]:
        """See `Backend`."""
        self._interpreter.set_tensor(self._input, frame)
        self._interpreter.invoke()
        get = self._interpreter.get_tensor
        return {name: dequantize(get(index), scale, zero) for name, (index, scale, zero) in self._outputs.items()}


def versions() -> dict[str, str]:
    """What this runtime is, in the words of a model file's record."""
    runtime = f"{RUNTIME} {RUNTIME_VERSION}"
    if RUNTIME == "ai_edge_litert":
        runtime = f"TensorFlow Lite {_LITERT_BEGAN} ({runtime})"
    return {"schema": _SCHEMA, "runtime": runtime}


def create_delegate(path: str, options: Mapping[str, str]) -> Any:
    """Load the accelerator's library and let it open its device."""
    try:
        return load_delegate(path, dict(options))
    except (OSError, AttributeError, ValueError) as error:
        raise DelegateRefusedError(f"cannot create delegate {path}: {_one_line(error)}") from error


def prepare(
    file: Path, delegate: Any | None, threads: int, input_name: str, outputs: tuple[str, ...], size: int
) -> LiteRt:
    """Read a model file and prepare its graph, on the delegate where there is one."""
    try:
        interpreter = Interpreter(
            model_path=str(file), experimental_delegates=[delegate] if delegate else None, num_threads=threads
        )
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError) as error:
        if delegate is not None:
            raise DelegateRefusedError(f"cannot prepare {file.name} on the delegate: {_one_line(error)}") from error
        raise _unloadable(file, error) from error
    return LiteRt(interpreter, input_name, outputs, size)


def damage(file: Path) -> InferenceError | None:
    """What is wrong with a model file by itself, without any delegate; None when it can be read."""
    try:
        Interpreter(model_path=str(file))
    except (ValueError, RuntimeError) as error:
        return _unloadable(file, error)
    return None


def _unloadable(file: Path, error: Exception) -> InferenceError:
    return InferenceError(f"cannot load {file.name}: {_one_line(error)}", "prepare the model again")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or "it gave no reason"


def invoke_errors() -> tuple[type[Exception], ...]:
    """What a failed invoke raises, in either runtime."""
    return (RuntimeError, ValueError)


def _bound_input(details: Mapping[str, Any], name: str, size: int) -> int:
    found = details.get(name)
    if found is None:
        raise InferenceError(f"cannot use model: its signature has inputs {sorted(details)} and no '{name}'")
    shape, dtype = [int(side) for side in found["shape"]], np.dtype(found["dtype"]).name
    if shape != [1, size, size, 3] or dtype != "uint8":
        raise InferenceError(f"cannot use model: input '{name}' is {dtype}{shape}, not uint8[1, {size}, {size}, 3]")
    return int(found["index"])


def _bound_outputs(details: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, tuple[int, float, int]]:
    bound = {}
    for name in names:
        found = details.get(name)
        if found is None:
            raise InferenceError(f"cannot use model: its signature has outputs {sorted(details)} and no '{name}'")
        scale, zero_point = (float(found["quantization"][0]), int(found["quantization"][1]))
        integer = np.issubdtype(found["dtype"], np.integer)
        # A converter that drops the scale leaves codes that look like huge real values: a plausible, wrong pose.
        if integer and not (math.isfinite(scale) and scale > 0):
            raise InferenceError(f"cannot use model: output '{name}' holds integers without one positive scale")
        bound[name] = (int(found["index"]), scale if integer else 0.0, zero_point)
    return bound

"""Reads a float .tflite as a network, whatever tool wrote it, or says why this one cannot be prepared.

Every input that is broken in its own way is refused in its own words: empty, not a model, damaged, open sizes, float16
or 4-bit weights, already quantized, compiled for an accelerator, an operator nobody here can write. Nothing runs before
all of that was checked: some runtimes crash on a custom operator they do not know.

An already quantized file is refused, because quantizing twice loses twice. Where its float original is lost, its values
are taken as the float model when that is asked for.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from inference.errors import InferenceError
from inference.prepare.graph import Kind, Layer, Net
from inference.prepare.operators import SUPPORTED, OperatorReader, UnsupportedError

_LIMIT_BYTES = 512 << 20
_MARK = b"TFL3"
_IMAGE, _CENTRED = "image", "centred"
_TYPES = {code: name for name, code in vars(schema.TensorType).items() if not name.startswith("_")}
_OPERATORS = {code: name for name, code in vars(schema.BuiltinOperator).items() if not name.startswith("_")}
_CODED = {"INT8", "UINT8", "INT16"}
_FOUR_BIT = {"INT4", "UINT4", "INT2"}
_COMPILED = {"ethos-u": "an Ethos-U", "edgetpu-custom-op": "an Edge TPU", "NeutronGraph": "a Neutron NPU"}
# What a damaged flatbuffer makes the generated reader raise.
_DAMAGE = (struct.error, ValueError, IndexError, TypeError, AttributeError, OverflowError, MemoryError)


@dataclass(frozen=True, slots=True)
class TfLite:
    """The network, its outputs under the names the file gives them, and what the bytes of a picture mean to it."""

    net: Net
    content: bytes
    quantized: bool
    low: float
    high: float


def read_tflite(path: Path, *, input_range: tuple[float, float] | None = None, dequantize: bool = False) -> TfLite:
    """Read a file; `input_range` is what the float input expects for a black and for a white pixel."""
    content = read_file(path)
    model = _parse(path, content)
    graph = model.subgraphs[0]
    names = operator_names(model)
    _refuse_compiled(path, names)
    _refuse_types(path, graph)
    coded = any(
        _TYPES[graph.tensors[index].type] in _CODED and _has_data(model, graph, index) for index in _read(graph)
    )
    if coded and not dequantize:
        raise _refused(
            path,
            "it is already quantized, and quantizing it twice would lose twice",
            "give the float model it was made from; where that is lost, --dequantize takes its values as float",
        )
    _refuse_unknown(path, graph, names)
    source, shape = _input(path, graph)
    reader = OperatorReader(model, _CENTRED, source)
    for index, operator in enumerate(graph.operators):
        name = names[operator.opcodeIndex]
        try:
            reader.add(name, operator)
        except UnsupportedError as error:
            raise _unsupported(path, index, name, str(error)) from error
    outputs = _outputs(path, model, reader)
    # A model that normalises its picture by itself was made for bytes.
    known = (0.0, 255.0) if input_range is None and reader.normalises else input_range
    fed_step, fed_shift = _normalisation(path, graph.tensors[source], known)
    step = fed_step * reader.gain
    shift = fed_shift - reader.offset / step
    low, high = -fed_shift * fed_step, (255 - fed_shift) * fed_step
    layers = (Layer(Kind.SUBTRACT, _CENTRED, (_IMAGE,), subtrahend=shift), *_scaled(path, reader.layers, step))
    return TfLite(Net(layers, _IMAGE, outputs, shape), content, coded, low, high)


def read_file(path: Path) -> bytes:
    """The bytes of a file that may be a model."""
    try:
        size = path.stat().st_size
        if size > _LIMIT_BYTES:
            raise _refused(path, f"it has {size} bytes, more than {_LIMIT_BYTES}")
        content = path.read_bytes()
    except OSError as error:
        raise _refused(path, str(error.strerror)) from error
    if not content:
        raise _refused(path, "it is empty", "copy or download it again")
    if content[4:8] != _MARK:
        raise _refused(path, f"it is not a .tflite model (its bytes 4 to 8 are {content[4:8]!r}, not {_MARK!r})")
    return content


def operator_names(model: Any) -> list[str]:
    """The name behind each operator code; a custom one's own name."""
    names = []
    for code in model.operatorCodes:
        builtin = max(code.builtinCode, code.deprecatedBuiltinCode)
        custom = builtin == schema.BuiltinOperator.CUSTOM
        names.append(
            (code.customCode or b"").decode(errors="replace") if custom else _OPERATORS.get(builtin, str(builtin))
        )
    return names


def _parse(path: Path, content: bytes) -> Any:
    try:
        model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(content))
        if len(model.subgraphs) != 1:
            raise _refused(path, f"it has {len(model.subgraphs)} graphs, and control flow cannot be prepared")
        graph = model.subgraphs[0]
        for operator in graph.operators:
            used = [index for index in (*operator.inputs, *operator.outputs) if index >= 0]
            if max(used) >= len(graph.tensors) or operator.opcodeIndex >= len(model.operatorCodes):
                raise ValueError("an operator names a tensor that is not there")
    except _DAMAGE as error:
        raise _refused(path, f"it is damaged ({error})", "copy or download it again") from error
    return model


def _refuse_compiled(path: Path, names: Sequence[str]) -> None:
    for name in names:
        if name in _COMPILED:
            raise _refused(
                path,
                f"it is compiled for {_COMPILED[name]} (operator {name!a})",
                "give the float model it was made from; the CPU needs that one too",
            )


def _refuse_unknown(path: Path, graph: Any, names: Sequence[str]) -> None:
    for index, operator in enumerate(graph.operators):
        name = names[operator.opcodeIndex]
        if name not in SUPPORTED:
            raise _unsupported(path, index, name, "is not supported")


def _refuse_types(path: Path, graph: Any) -> None:
    for index in _read(graph):
        tensor = graph.tensors[index]
        kind = _TYPES[tensor.type]
        name = tensor.name.decode(errors="replace")
        if kind == "FLOAT16":
            raise _refused(
                path, f"tensor {name!a} is stored as float16", "convert it again without the float16 option, as float32"
            )
        if kind in _FOUR_BIT:
            raise _refused(path, f"tensor {name!a} has {kind[-1]}-bit weights", "give the float model it was made from")
        open_sides = [
            side for side in list(tensor.shapeSignature if tensor.shapeSignature is not None else [])[1:] if side < 0
        ]
        if open_sides or any(side < 1 for side in _shape(tensor)[1:]):
            signature = [int(side) for side in (tensor.shapeSignature if open_sides else tensor.shape)]
            raise _refused(
                path,
                f"tensor {name!a} has no fixed size ({signature})",
                "convert it again with a fixed input, such as [1, 224, 224, 3]",
            )


def _read(graph: Any) -> list[int]:
    """Every tensor that an operator reads or writes."""
    return sorted(
        {int(index) for operator in graph.operators for index in (*operator.inputs, *operator.outputs) if index >= 0}
    )


def _has_data(model: Any, graph: Any, index: int) -> bool:
    return model.buffers[graph.tensors[index].buffer].data is not None


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(side) for side in (tensor.shape if tensor.shape is not None else ()))


def _input(path: Path, graph: Any) -> tuple[int, tuple[int, ...]]:
    if len(graph.inputs) != 1:
        raise _refused(path, f"it has {len(graph.inputs)} inputs; a picture is one")
    source = int(graph.inputs[0])
    shape = _shape(graph.tensors[source])
    if len(shape) != 4 or shape[0] != 1 or shape[3] != 3:
        raise _refused(path, f"its input is {list(shape)}, not one RGB picture [1, height, width, 3]")
    if shape[1] != shape[2]:
        raise _refused(path, f"its input is {list(shape)}; a picture is prepared as a square")
    return source, shape


def _normalisation(path: Path, tensor: Any, given: tuple[float, float] | None) -> tuple[float, float]:
    """The step and the shift of x = step * (byte - shift)."""
    if given is not None:
        low, high = given
        if not high > low:
            raise _refused(path, f"the input range {low}, {high} is empty", "name black first, then white")
        return (high - low) / 255, -low * 255 / (high - low)
    quantization = tensor.quantization
    if quantization is not None and quantization.scale is not None and len(quantization.scale) == 1:
        # int8 codes of a picture are its bytes less 128.
        zero = int(quantization.zeroPoint[0]) + (128 if _TYPES[tensor.type] == "INT8" else 0)
        return float(quantization.scale[0]), float(zero)
    raise _refused(
        path,
        "nothing in it says what its input expects for black and white",
        "add --input-range LOW,HIGH: what it was trained with, such as -1,1 or 0,1 or 0,255",
    )


def _outputs(path: Path, model: Any, reader: OperatorReader) -> dict[str, str]:
    graph = model.subgraphs[0]
    signature = (model.signatureDefs or [None])[0]
    if signature is not None and signature.outputs:
        named = {entry.name.decode(): int(entry.tensorIndex) for entry in signature.outputs}
    else:
        named = {f"output_{number}": int(index) for number, index in enumerate(graph.outputs)}
    missing = [name for name, index in named.items() if index not in reader.tensors]
    if missing or not named:
        raise _refused(path, f"no operator writes its output {', '.join(missing) or '(it has none)'}")
    return {name: reader.tensors[index] for name, index in named.items()}


def _scaled(path: Path, layers: Sequence[Layer], step: float) -> list[Layer]:
    """Move the normalisation's step into the weights that read the picture."""
    carrying = {_CENTRED}
    result = []
    for layer in layers:
        changed = layer
        if carrying.intersection(layer.inputs):
            if layer.kind is Kind.PAD:
                carrying.add(layer.out)
            elif layer.has_weights:
                changed = replace(layer, weights=np.asarray(layer.kernel * np.float32(step)))
            else:
                raise _refused(path, f"its picture goes into {layer.kind.upper()}, not into a convolution")
        result.append(changed)
    return result


def _unsupported(path: Path, index: int, name: str, why: str) -> InferenceError:
    remedy = "cut the model before it, or leave that part to the program that reads its outputs"
    return _refused(path, f"operator {index}, {name!a}, {why}", remedy)


def _refused(path: Path, cause: str, remedy: str = "") -> InferenceError:
    return InferenceError(f"cannot read model {path}: {cause}", remedy)

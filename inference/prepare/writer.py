"""Writes a network as a .tflite file: the flatbuffer, with a signature that names its input and outputs.

Needs only flatbuffers and the schema that the runtime's wheel carries; TensorFlow nowhere. The same network gives the
same bytes. Operator versions are the lowest whose kernels accept what is written here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import flatbuffers
import numpy as np
import numpy.typing as npt
from ai_edge_litert import schema_py_generated as schema

from inference.prepare.graph import Activation, Array, Kind, Layer, Net, Padding

SIGNATURE = "serving_default"
# Operator code and version of each kind. RESIZE 3 has half-pixel centres; CONV and DEPTHWISE 3 take int8.
OPERATORS = {
    Kind.CONV: (schema.BuiltinOperator.CONV_2D, 3),
    Kind.DEPTHWISE: (schema.BuiltinOperator.DEPTHWISE_CONV_2D, 3),
    Kind.ADD: (schema.BuiltinOperator.ADD, 2),
    Kind.SUBTRACT: (schema.BuiltinOperator.SUB, 2),
    Kind.RESIZE: (schema.BuiltinOperator.RESIZE_BILINEAR, 3),
    Kind.SIGMOID: (schema.BuiltinOperator.LOGISTIC, 2),
    Kind.PAD: (schema.BuiltinOperator.PAD, 2),
    Kind.AVERAGE: (schema.BuiltinOperator.AVERAGE_POOL_2D, 2),
    Kind.LARGEST: (schema.BuiltinOperator.MAX_POOL_2D, 2),
    Kind.RESHAPE: (schema.BuiltinOperator.RESHAPE, 1),
    Kind.SOFTMAX: (schema.BuiltinOperator.SOFTMAX, 2),
}
QUANTIZE = (schema.BuiltinOperator.QUANTIZE, 2)
TYPES = {
    "float32": schema.TensorType.FLOAT32,
    "int8": schema.TensorType.INT8,
    "uint8": schema.TensorType.UINT8,
    "int32": schema.TensorType.INT32,
}
_ACTIVATIONS = {
    Activation.NONE: schema.ActivationFunctionType.NONE,
    Activation.RELU: schema.ActivationFunctionType.RELU,
    Activation.RELU6: schema.ActivationFunctionType.RELU6,
}
_PADDINGS = {Padding.SAME: schema.Padding.SAME, Padding.VALID: schema.Padding.VALID}


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """real = scale * (code - zero_point); one scale, or one for each slice along `axis`."""

    scale: float | Array
    zero_point: int
    axis: int = 0


class FileWriter:
    """Collects tensors and operators, then packs them."""

    def __init__(self) -> None:
        self._graph = schema.SubGraphT()
        self._graph.name = b"main"
        self._graph.tensors, self._graph.operators = [], []
        self._model = schema.ModelT()
        self._model.version = 3
        self._model.description = b"avocado-infer prepare"
        self._model.subgraphs = [self._graph]
        # Buffer 0 means "no data" to the runtime.
        self._model.buffers = [schema.BufferT()]
        self._model.operatorCodes = []
        self._codes: dict[tuple[int, int], int] = {}
        self._index: dict[str, int] = {}

    def index(self, name: str) -> int:
        """Where a tensor was put."""
        return self._index[name]

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        dtype: npt.DTypeLike,
        data: Array | None = None,
        affine: Affine | None = None,
    ) -> int:
        """Add a tensor; with `data` it is a constant."""
        tensor = schema.TensorT()
        tensor.name, tensor.shape, tensor.buffer = name.encode(), [int(side) for side in shape], 0
        tensor.type = TYPES[np.dtype(dtype).name]
        if data is not None:
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(np.ascontiguousarray(data).tobytes(), np.uint8)
            tensor.buffer = len(self._model.buffers)
            self._model.buffers.append(buffer)
        if affine is not None:
            tensor.quantization = _quantization(affine)
        self._index[name] = len(self._graph.tensors)
        self._graph.tensors.append(tensor)
        return self._index[name]

    def layer(self, layer: Layer, inputs: Sequence[int], output: int) -> None:
        """Add the operator of a layer whose tensors are already there."""
        kind, options = _options(layer)
        self.operator(OPERATORS[layer.kind], inputs, [output], kind, options)

    def quantize(self, source: int, output: int) -> None:
        """Add a QUANTIZE, which changes one code into another."""
        options = schema.QuantizeOptionsT()
        self.operator(QUANTIZE, [source], [output], schema.BuiltinOptions.QuantizeOptions, options)

    def operator(
        self, code: tuple[int, int], inputs: Sequence[int], outputs: Sequence[int], kind: int, options: Any
    ) -> None:
        """Add any operator, by its code and version, whose tensors are already there."""
        if code not in self._codes:
            entry = schema.OperatorCodeT()
            entry.builtinCode, entry.version = code
            entry.deprecatedBuiltinCode = min(code[0], 127)
            self._codes[code] = len(self._model.operatorCodes)
            self._model.operatorCodes.append(entry)
        operator = schema.OperatorT()
        operator.opcodeIndex = self._codes[code]
        operator.inputs, operator.outputs = list(inputs), list(outputs)
        operator.builtinOptionsType, operator.builtinOptions = kind, options
        self._graph.operators.append(operator)

    def finish(self, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> bytes:
        """The file, whose signature gives these names to these tensors."""
        signature = schema.SignatureDefT()
        signature.signatureKey, signature.subgraphIndex = SIGNATURE.encode(), 0
        signature.inputs, signature.outputs = self._names(inputs), self._names(outputs)
        self._model.signatureDefs = [signature]
        self._graph.inputs = [self._index[tensor] for tensor in inputs.values()]
        self._graph.outputs = [self._index[tensor] for tensor in outputs.values()]
        builder = flatbuffers.Builder(1 << 20)
        builder.Finish(self._model.Pack(builder), b"TFL3")
        return bytes(builder.Output())

    def _names(self, names: Mapping[str, str]) -> list[Any]:
        entries = []
        for name, tensor in names.items():
            entry = schema.TensorMapT()
            entry.name, entry.tensorIndex = name.encode(), self._index[tensor]
            entries.append(entry)
        return entries


def write_float(net: Net, *, watch: Sequence[str] = ()) -> bytes:
    """The network in float32; `watch` names inner tensors to give out as well, under their own names."""
    writer = FileWriter()
    writer.tensor(net.input, net.input_shape, "float32")
    for layer in net.layers:
        inputs = [writer.index(name) for name in layer.inputs]
        if layer.has_weights:
            inputs.append(writer.tensor(f"{layer.out}/weights", layer.kernel.shape, "float32", layer.kernel))
            inputs.append(writer.tensor(f"{layer.out}/bias", layer.offset.shape, "float32", layer.offset))
        elif layer.kind is Kind.SUBTRACT:
            inputs.append(
                writer.tensor(f"{layer.out}/subtrahend", (), "float32", np.array(layer.subtrahend, np.float32))
            )
        else:
            inputs += argument_tensors(writer, layer)
        writer.layer(layer, inputs, writer.tensor(layer.out, net.shapes[layer.out], "float32"))
    return writer.finish({net.input: net.input}, {**net.outputs, **{name: name for name in watch}})


def argument_tensors(writer: FileWriter, layer: Layer) -> list[int]:
    """The constants that an operator without weights takes as inputs: sizes and paddings."""
    match layer.kind:
        case Kind.RESIZE:
            values = np.array(layer.size, np.int32)
        case Kind.RESHAPE:
            values = np.array(layer.shape, np.int32)
        case Kind.PAD:
            values = np.array([(0, 0), layer.pads[:2], layer.pads[2:], (0, 0)], np.int32)
        case _:
            return []
    return [writer.tensor(f"{layer.out}/size", values.shape, "int32", values)]


def _quantization(affine: Affine) -> Any:
    parameters = schema.QuantizationParametersT()
    scales = np.atleast_1d(np.asarray(affine.scale, np.float32))
    parameters.scale = scales.tolist()
    parameters.zeroPoint = [affine.zero_point] * len(scales)
    parameters.quantizedDimension = affine.axis
    return parameters


def _options(layer: Layer) -> tuple[int, Any]:
    kinds = schema.BuiltinOptions
    match layer.kind:
        case Kind.CONV:
            return kinds.Conv2DOptions, _convolution(schema.Conv2DOptionsT(), layer)
        case Kind.DEPTHWISE:
            options = _convolution(schema.DepthwiseConv2DOptionsT(), layer)
            options.depthMultiplier = 1
            return kinds.DepthwiseConv2DOptions, options
        case Kind.ADD:
            options = schema.AddOptionsT()
            options.fusedActivationFunction = _ACTIVATIONS[layer.activation]
            return kinds.AddOptions, options
        case Kind.SUBTRACT:
            return kinds.SubOptions, schema.SubOptionsT()
        case Kind.RESIZE:
            options = schema.ResizeBilinearOptionsT()
            options.alignCorners, options.halfPixelCenters = False, True
            return kinds.ResizeBilinearOptions, options
        case Kind.SIGMOID:
            return kinds.NONE, None
        case Kind.PAD:
            return kinds.PadOptions, schema.PadOptionsT()
        case Kind.AVERAGE | Kind.LARGEST:
            return kinds.Pool2DOptions, _pool(layer)
        case Kind.RESHAPE:
            options = schema.ReshapeOptionsT()
            options.newShape = list(layer.shape or ())
            return kinds.ReshapeOptions, options
        case Kind.SOFTMAX:
            options = schema.SoftmaxOptionsT()
            options.beta = 1.0
            return kinds.SoftmaxOptions, options


def _convolution(options: Any, layer: Layer) -> Any:
    options.strideW = options.strideH = layer.stride
    options.dilationWFactor = options.dilationHFactor = 1
    options.padding = _PADDINGS[layer.padding]
    options.fusedActivationFunction = _ACTIVATIONS[layer.activation]
    return options


def _pool(layer: Layer) -> Any:
    options = schema.Pool2DOptionsT()
    options.filterHeight, options.filterWidth = layer.size or (1, 1)
    options.strideW = options.strideH = layer.stride
    options.padding = _PADDINGS[layer.padding]
    options.fusedActivationFunction = _ACTIVATIONS[layer.activation]
    return options

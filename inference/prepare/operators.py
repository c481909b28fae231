"""Turns one operator of a .tflite after another into layers, and refuses what no writer here could write again.

Codes become real values on the way: weights and biases of a quantized file are taken at what they stand for, and its
QUANTIZE and DEQUANTIZE vanish. A fully connected layer becomes a 1 x 1 convolution, which every NPU takes; a mean over
height and width becomes a pool; arithmetic with one number, done to the picture itself, becomes its normalisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from inference.prepare.graph import Activation, Array, Kind, Layer, Padding, Shape

_PADDINGS = {schema.Padding.SAME: Padding.SAME, schema.Padding.VALID: Padding.VALID}
_ACTIVATIONS = {
    schema.ActivationFunctionType.NONE: Activation.NONE,
    schema.ActivationFunctionType.RELU: Activation.RELU,
    schema.ActivationFunctionType.RELU6: Activation.RELU6,
}
_ACTIVATION_NAMES = {
    code: name for name, code in vars(schema.ActivationFunctionType).items() if not name.startswith("_")
}
_DTYPES = {
    schema.TensorType.FLOAT32: np.float32,
    schema.TensorType.INT32: np.int32,
    schema.TensorType.INT8: np.int8,
    schema.TensorType.UINT8: np.uint8,
    schema.TensorType.INT16: np.int16,
    schema.TensorType.INT64: np.int64,
}


SUPPORTED = frozenset(
    (
        *("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "ADD", "SUB", "MUL", "RESIZE_BILINEAR"),
        *("LOGISTIC", "SOFTMAX", "AVERAGE_POOL_2D", "MAX_POOL_2D", "MEAN", "PAD", "RESHAPE", "SQUEEZE"),
        *("QUANTIZE", "DEQUANTIZE"),
    )
)


class UnsupportedError(Exception):
    """Why an operator cannot be taken; the text continues "operator 3, 'NAME', ..."."""


class OperatorReader:
    """Collects layers; `tensors` maps the file's activations to the names they have here."""

    def __init__(self, model: Any, source_name: str, source: int) -> None:
        self._graph = model.subgraphs[0]
        self._buffers = model.buffers
        self.layers: list[Layer] = []
        self.tensors: dict[int, str] = {source: source_name}
        # What the picture has become: gain * byte + offset.
        self.gain, self.offset, self.normalises = 1.0, 0.0, False
        self._picture = source_name
        self._taken = {source_name}
        self._readers: dict[str, Callable[[Any, str], Layer | None]] = {
            "CONV_2D": self._convolution,
            "DEPTHWISE_CONV_2D": self._depthwise,
            "FULLY_CONNECTED": self._fully_connected,
            "ADD": self._sum,
            "SUB": lambda operator, out: self._normalise(operator, 1.0, -1.0),
            "MUL": lambda operator, out: self._normalise(operator, None, 0.0),
            "RESIZE_BILINEAR": self._resize,
            "LOGISTIC": lambda operator, out: Layer(Kind.SIGMOID, out, self._inputs(operator, 1)),
            "SOFTMAX": self._softmax,
            "AVERAGE_POOL_2D": lambda operator, out: self._pool(Kind.AVERAGE, operator, out),
            "MAX_POOL_2D": lambda operator, out: self._pool(Kind.LARGEST, operator, out),
            "MEAN": self._mean,
            "PAD": self._pad,
            "RESHAPE": self._reshape,
            "SQUEEZE": self._reshape,
            "QUANTIZE": self._alias,
            "DEQUANTIZE": self._alias,
        }

    def add(self, name: str, operator: Any) -> None:
        """Take one operator; UnsupportedError says why not."""
        if len(operator.outputs) != 1:
            raise UnsupportedError(f"has {len(operator.outputs)} outputs")
        index = int(operator.outputs[0])
        layer = self._readers[name](operator, self._name(index))
        if layer is not None:
            self.layers.append(layer)
            self.tensors[index] = layer.out

    def _name(self, index: int) -> str:
        text = self._graph.tensors[index].name.decode(errors="replace").split(";")[0]
        name = text if text.isascii() and text.isprintable() and 0 < len(text) <= 120 else f"tensor_{index}"
        if name in self._taken:
            name = f"{name}_{index}"
        self._taken.add(name)
        return name

    def _inputs(self, operator: Any, count: int) -> tuple[str, ...]:
        indices = [int(index) for index in operator.inputs[:count]]
        missing = [index for index in indices if index not in self.tensors]
        if missing:
            raise UnsupportedError("reads a constant where an activation is expected")
        return tuple(self.tensors[index] for index in indices)

    def _shape(self, index: int) -> Shape:
        shape = self._graph.tensors[index].shape
        return tuple(int(side) for side in (shape if shape is not None else ()))

    def _constant(self, operator: Any, position: int) -> Array:
        """The real values of a constant input."""
        index = int(operator.inputs[position]) if position < len(operator.inputs) else -1
        if index < 0:
            raise UnsupportedError("lacks an input")
        tensor = self._graph.tensors[index]
        data = self._buffers[tensor.buffer].data
        if data is None or tensor.type not in _DTYPES:
            raise UnsupportedError("computes its weights while it runs")
        values = np.frombuffer(np.asarray(data, np.uint8).tobytes(), _DTYPES[tensor.type]).reshape(self._shape(index))
        return _real(values, tensor.quantization)

    def _integers(self, operator: Any, position: int) -> list[int]:
        return [int(value) for value in self._constant(operator, position).ravel()]

    def _bias(self, operator: Any, channels: int) -> Array:
        if len(operator.inputs) < 3 or operator.inputs[2] < 0:
            return np.zeros(channels, np.float32)
        return self._constant(operator, 2).astype(np.float32)

    def _convolution(self, operator: Any, out: str) -> Layer:
        weights = self._constant(operator, 1).astype(np.float32)
        return Layer(
            Kind.CONV, out, self._inputs(operator, 1), weights, self._bias(operator, len(weights)), **_window(operator)
        )

    def _depthwise(self, operator: Any, out: str) -> Layer:
        weights = self._constant(operator, 1).astype(np.float32)
        if self._shape(int(operator.inputs[0]))[3] != weights.shape[3]:
            raise UnsupportedError("makes several channels of one")
        bias = self._bias(operator, weights.shape[3])
        return Layer(Kind.DEPTHWISE, out, self._inputs(operator, 1), weights, bias, **_window(operator))

    def _fully_connected(self, operator: Any, out: str) -> Layer:
        weights = self._constant(operator, 1).astype(np.float32)
        (source,) = self._inputs(operator, 1)
        wide, flat = f"{out}/wide", f"{out}/points"
        self.layers.append(Layer(Kind.RESHAPE, wide, (source,), shape=(1, 1, 1, weights.shape[1])))
        activation = _activation(operator.builtinOptions)
        bias = self._bias(operator, len(weights))
        self.layers.append(Layer(Kind.CONV, flat, (wide,), weights[:, None, None], bias, activation=activation))
        return Layer(Kind.RESHAPE, out, (flat,), shape=(1, len(weights)))

    def _sum(self, operator: Any, out: str) -> Layer | None:
        if int(operator.inputs[1]) not in self.tensors:
            return self._normalise(operator, 1.0, 1.0)
        first, second = (self._shape(int(index)) for index in operator.inputs)
        if first != second:
            raise UnsupportedError(f"adds {list(second)} to {list(first)}")
        return Layer(Kind.ADD, out, self._inputs(operator, 2), activation=_activation(operator.builtinOptions))

    def _normalise(self, operator: Any, factor: float | None, sign: float) -> Layer | None:
        """x becomes factor * x + sign * number; without a factor the number is the factor."""
        number = self._constant(operator, 1)
        used = any(self._picture in layer.inputs for layer in self.layers)
        if self._inputs(operator, 1) != (self._picture,) or used or number.size != 1:
            raise UnsupportedError("does arithmetic with constants on something else than the whole picture")
        amount = float(number.ravel()[0])
        scale = amount if factor is None else factor
        if scale <= 0:
            raise UnsupportedError("turns the picture into its negative")
        self.gain, self.offset = self.gain * scale, self.offset * scale + sign * amount
        self.normalises = True
        self.tensors[int(operator.outputs[0])] = self._picture
        return None

    def _resize(self, operator: Any, out: str) -> Layer:
        options = operator.builtinOptions
        if options.alignCorners or not options.halfPixelCenters:
            raise UnsupportedError("resizes without half-pixel centres")
        height, width = self._integers(operator, 1)
        return Layer(Kind.RESIZE, out, self._inputs(operator, 1), size=(height, width))

    def _softmax(self, operator: Any, out: str) -> Layer:
        if operator.builtinOptions.beta != 1:
            raise UnsupportedError(f"has the temperature {operator.builtinOptions.beta:g}")
        return Layer(Kind.SOFTMAX, out, self._inputs(operator, 1))

    def _pool(self, kind: Kind, operator: Any, out: str) -> Layer:
        options = operator.builtinOptions
        window = _window(operator)
        return Layer(kind, out, self._inputs(operator, 1), size=(options.filterHeight, options.filterWidth), **window)

    def _mean(self, operator: Any, out: str) -> Layer:
        """Over height and width; where the sides are dropped, a reshape does that."""
        before, after = self._shape(int(operator.inputs[0])), self._shape(int(operator.outputs[0]))
        if len(before) != 4 or sorted(axis % 4 for axis in self._integers(operator, 1)) != [1, 2]:
            raise UnsupportedError("is not over height and width")
        pooled = out if len(after) == 4 else f"{out}/pooled"
        size = (before[1], before[2])
        layer = Layer(Kind.AVERAGE, pooled, self._inputs(operator, 1), size=size, padding=Padding.VALID)
        if len(after) == 4:
            return layer
        self.layers.append(layer)
        return Layer(Kind.RESHAPE, out, (pooled,), shape=after)

    def _pad(self, operator: Any, out: str) -> Layer:
        amounts = self._integers(operator, 1)
        if len(amounts) != 8 or any(amounts[:2] + amounts[6:]):
            raise UnsupportedError("pads more than height and width")
        above, below, left, right = amounts[2:6]
        return Layer(Kind.PAD, out, self._inputs(operator, 1), pads=(above, below, left, right))

    def _reshape(self, operator: Any, out: str) -> Layer:
        return Layer(Kind.RESHAPE, out, self._inputs(operator, 1), shape=self._shape(int(operator.outputs[0])))

    def _alias(self, operator: Any, out: str) -> None:
        (source,) = self._inputs(operator, 1)
        self._taken.discard(out)
        self.tensors[int(operator.outputs[0])] = source


def _real(values: Array, quantization: Any) -> Array:
    """What codes stand for; float values are themselves."""
    if quantization is None or quantization.scale is None or not len(quantization.scale):
        return values
    scales = np.asarray(quantization.scale, np.float64)
    zeros = np.asarray(quantization.zeroPoint, np.float64) if quantization.zeroPoint is not None else np.zeros(1)
    if scales.size > 1:
        sides = [1] * values.ndim
        sides[quantization.quantizedDimension] = scales.size
        scales, zeros = scales.reshape(sides), np.broadcast_to(zeros, scales.size).reshape(sides)
    return np.asarray((values - zeros) * scales, np.float32)


def _activation(options: Any) -> Activation:
    code = options.fusedActivationFunction
    if code not in _ACTIVATIONS:
        raise UnsupportedError(f"is followed by {_ACTIVATION_NAMES.get(code, code)}")
    return _ACTIVATIONS[code]


def _window(operator: Any) -> dict[str, Any]:
    options = operator.builtinOptions
    if options.strideW != options.strideH:
        raise UnsupportedError("strides differently along height and width")
    if getattr(options, "dilationWFactor", 1) != 1 or getattr(options, "dilationHFactor", 1) != 1:
        raise UnsupportedError("is dilated")
    return {
        "stride": int(options.strideW),
        "padding": _PADDINGS[options.padding],
        "activation": _activation(options),
    }

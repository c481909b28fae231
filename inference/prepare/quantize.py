"""Writes a network in int8: camera bytes in, int8 heads out, weights symmetric and per channel (or per tensor).

The input tensor is uint8 whose zero point is the byte that the model calls zero, so that a frame goes in unconverted;
one QUANTIZE turns it into int8 and stands for the subtraction of the normalisation, whose remainder (127.502 is not
128) goes into the first bias. What only moves values keeps its input's scale; LOGISTIC and SOFTMAX have the fixed one
that every kernel expects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from inference.prepare.calibrate import Range
from inference.prepare.graph import SAME_CODES, Array, Kind, Layer, Net
from inference.prepare.writer import Affine, FileWriter, argument_tensors

_SHARE = Affine(1 / 256, -128)
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A layer's weights as int8 and the scale of each output channel (one when per tensor)."""

    weights: Array
    scales: Array


def affine(known: Range) -> Affine:
    """The int8 codes of a range; it always holds zero, which padding needs exactly."""
    low, high = min(known.low, 0.0), max(known.high, 1e-6)
    scale = (high - low) / 255
    return Affine(scale, int(np.clip(round(-128 - low / scale), -128, 127)))


def round_weights(layer: Layer, *, per_channel: bool) -> Codes:
    """Each weight rounded to the nearest code."""
    kernel = layer.kernel
    if per_channel:
        others = tuple(axis for axis in range(4) if axis != layer.channel_axis)
        largest = np.abs(kernel).max(axis=others, keepdims=True)
    else:
        largest = np.abs(kernel).max(keepdims=True)
    scales = np.maximum(largest, 1e-9) / 127
    return Codes(np.clip(np.round(kernel / scales), -127, 127).astype(np.int8), scales.ravel())


def round_all(net: Net, *, per_channel: bool) -> dict[str, Codes]:
    """The codes of every weighted layer, each weight rounded by itself."""
    return {layer.out: round_weights(layer, per_channel=per_channel) for layer in net.layers if layer.has_weights}


def write_int8(
    net: Net, ranges: Mapping[str, Range], *, codes: Mapping[str, Codes], biases: Mapping[str, Array] | None = None
) -> bytes:
    """The network in int8, with these weights; `biases` replaces the layers' own."""
    writer = FileWriter()
    centred = normalisation(net)
    source = writer.tensor(net.input, net.input_shape, "uint8", affine=Affine(1.0, zero_byte(net)))
    writer.quantize(source, writer.tensor(centred.out, net.input_shape, "int8", affine=centred_codes(net)))
    lay_int8(writer, net, ranges, codes=codes, biases=biases)
    return writer.finish({net.input: net.input}, net.outputs)


def lay_int8(
    writer: FileWriter,
    net: Net,
    ranges: Mapping[str, Range],
    *,
    codes: Mapping[str, Codes],
    biases: Mapping[str, Array] | None = None,
) -> dict[str, Affine]:
    """Put the network behind its normalisation, which is there already; returns the codes of every tensor."""
    affines: dict[str, Affine] = {}
    remainders: dict[str, float] = {}
    for layer in net.layers:
        if layer.kind is Kind.SUBTRACT:
            affines[layer.out] = centred_codes(net)
            remainders[layer.out] = zero_byte(net) - layer.subtrahend
            continue
        source = layer.inputs[0]
        affines[layer.out] = _output_codes(layer, affines[source], ranges)
        inputs = [writer.index(name) for name in layer.inputs]
        if layer.has_weights:
            bias = layer.offset if biases is None else biases[layer.out]
            bias = bias + remainders.get(source, 0.0) * _sums(layer)
            inputs += _constants(writer, layer, codes[layer.out], bias, affines[source])
        else:
            inputs += argument_tensors(writer, layer)
            if layer.kind is Kind.PAD and source in remainders:
                remainders[layer.out] = remainders[source]
        writer.layer(layer, inputs, writer.tensor(layer.out, net.shapes[layer.out], "int8", affine=affines[layer.out]))
    return affines


def zero_byte(net: Net) -> int:
    """The byte that stands for the model's zero, which is also what its paddings mean."""
    return int(np.clip(round(normalisation(net).subtrahend), 0, 255))


def normalisation(net: Net) -> Layer:
    """The layer that subtracts the model's zero from the picture."""
    (layer,) = (layer for layer in net.layers if layer.kind is Kind.SUBTRACT)
    return layer


def centred_codes(net: Net) -> Affine:
    """The int8 codes of the picture minus that byte."""
    return Affine(1.0, zero_byte(net) - 128)


def _output_codes(layer: Layer, source: Affine, ranges: Mapping[str, Range]) -> Affine:
    if layer.kind in (Kind.SIGMOID, Kind.SOFTMAX):
        return _SHARE
    if layer.kind in SAME_CODES:
        return source
    return affine(ranges[layer.out])


def _sums(layer: Layer) -> Array:
    """The sum of each output channel's weights: what a constant added to the input adds to the output."""
    others = tuple(axis for axis in range(4) if axis != layer.channel_axis)
    return np.asarray(layer.kernel.sum(axis=others))


def _constants(writer: FileWriter, layer: Layer, rounded: Codes, bias: Array, source: Affine) -> list[int]:
    scales = (rounded.scales * source.scale).astype(np.float32)
    steps = np.clip(np.round(bias / scales.astype(np.float64)), _INT32.min, _INT32.max).astype(np.int32)
    weights = Affine(rounded.scales, 0, layer.channel_axis)
    return [
        writer.tensor(f"{layer.out}/weights", layer.kernel.shape, "int8", rounded.weights, weights),
        writer.tensor(f"{layer.out}/bias", bias.shape, "int32", steps, Affine(scales, 0)),
    ]

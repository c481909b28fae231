"""Gives back the mean that quantization takes: each layer's bias is moved by what its output lost on average.

One layer after another, each on what the INT8 network before it really produces. Several at once would correct the same
error twice, which destroys the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from inference.prepare.calibrate import Pictures, Range
from inference.prepare.graph import Array, Kind, Layer, Net
from inference.prepare.progress import bar
from inference.prepare.quantize import Codes, write_int8
from inference.prepare.run import Runner
from inference.prepare.writer import write_float


def correct_biases(
    net: Net, pictures: Pictures, ranges: Mapping[str, Range], codes: Mapping[str, Codes]
) -> dict[str, Array]:
    """A bias for every weighted layer."""
    weighted = [layer for layer in net.layers if layer.has_weights]
    sources = tuple(dict.fromkeys(layer.inputs[0] for layer in weighted))
    exact = _means(Runner(write_float(net, watch=sources)), pictures, sources)
    biases = {layer.out: layer.offset.astype(np.float64) for layer in weighted}
    seen: dict[str, Array] = {name: exact[name] for name in _shifted(net) if name in exact}
    for layer in bar(weighted, "correct biases", unit="layer"):
        source = layer.inputs[0]
        if source not in seen:
            head = _down_to(net, source)
            runner = Runner(write_int8(head, ranges, codes=codes, biases=biases))
            seen.update(_means(runner, pictures, (source,)))
        biases[layer.out] = biases[layer.out] + _response(layer, layer.kernel, exact[source])
        biases[layer.out] -= _response(layer, _values(layer, codes[layer.out]), seen[source])
    return biases


def _shifted(net: Net) -> set[str]:
    """The picture as the network sees it; what int8 loses there is in the first bias already."""
    shifted: set[str] = set()
    for layer in net.layers:
        if layer.kind is Kind.SUBTRACT or (layer.kind is Kind.PAD and layer.inputs[0] in shifted):
            shifted.add(layer.out)
    return shifted


def _down_to(net: Net, tensor: str) -> Net:
    """The part of the network that one tensor needs, with that tensor as its only output."""
    needed = {tensor}
    for layer in reversed(net.layers):
        if layer.out in needed:
            needed.update(layer.inputs)
    layers = tuple(layer for layer in net.layers if layer.out in needed)
    return Net(layers, net.input, {tensor: tensor}, net.input_shape)


def _means(runner: Runner, pictures: Pictures, names: tuple[str, ...]) -> dict[str, Array]:
    sums: dict[str, Array] = {}
    count = 0
    for values in runner.over(pictures()):
        count += 1
        for name in names:
            mean = values[name].reshape(-1, values[name].shape[-1]).mean(axis=0, dtype=np.float64)
            sums[name] = mean + sums.get(name, 0.0)
    return {name: total / count for name, total in sums.items()}


def _values(layer: Layer, codes: Codes) -> Array:
    shape = (-1, 1, 1, 1) if layer.kind is Kind.CONV else (1, 1, 1, -1)
    return np.asarray(codes.weights * codes.scales.reshape(shape))


def _response(layer: Layer, weights: Array, mean: Array) -> Array:
    """The mean output for a mean input, away from the borders."""
    if layer.kind is Kind.CONV:
        return np.asarray(weights.sum(axis=(1, 2), dtype=np.float64) @ mean)
    return np.asarray(weights.sum(axis=(0, 1, 2), dtype=np.float64) * mean)

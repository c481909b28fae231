"""Cross-layer equalisation that leaves the network's function alone and gives one scale per tensor a chance.

A channel of a tensor may be divided by any positive factor when the weights that read it are multiplied by the same
one. The factors are chosen so that no channel of a weight tensor dwarfs the others: MoveNet's depthwise layers reach
230 with a median of 1, which is what makes naive per-tensor INT8 collapse. Two things bind the choice. Tensors tied by
an ADD, a RESIZE or a pool share their factors. And a ReLU6 clips at 6 whatever the factor, so a channel that really
clips on the calibration pictures keeps the factor 1, while any other may grow only as long as it stays below 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from inference.prepare.calibrate import Pictures
from inference.prepare.graph import SAME_CHANNELS, Activation, Array, Kind, Layer, Net
from inference.prepare.run import Runner
from inference.prepare.writer import write_float

_CLIPS_AT = 6.0
_CLIPPED = 5.999
# A channel that clips on more than this share of its pixels really clips.
_CLIPPED_SHARE = 1e-4
_ROUNDS = 40
_SETTLED = 1e-3
_LEAST, _MOST = 1e-3, 1e3


@dataclass(frozen=True, slots=True, eq=False)
class Activity:
    """What each channel of a tensor did on the calibration pictures."""

    largest: Array
    clips: Array


def activity(net: Net, pictures: Pictures) -> dict[str, Activity]:
    """The largest magnitude of every channel, and whether its ReLU6 really clips."""
    largest = {name: np.zeros(net.shapes[name][-1]) for name in net.tensors}
    clipped = {name: np.zeros(net.shapes[name][-1]) for name in net.tensors}
    runner = Runner(write_float(net, watch=net.tensors))
    count = 0
    for values in runner.over(pictures()):
        count += 1
        for name in net.tensors:
            pixels = values[name].reshape(-1, values[name].shape[-1])
            largest[name] = np.maximum(largest[name], np.abs(pixels).max(axis=0))
            clipped[name] += (pixels >= _CLIPPED).mean(axis=0)
    return {name: Activity(largest[name], clipped[name] / count > _CLIPPED_SHARE) for name in net.tensors}


def equalise(net: Net, seen: Mapping[str, Activity]) -> Net:
    """The same function with weights whose channels are alike in size."""
    groups = _Groups(net)
    weights = {layer.out: layer.kernel.astype(np.float64) for layer in net.layers if layer.has_weights}
    biases = {layer.out: layer.offset.astype(np.float64) for layer in net.layers if layer.has_weights}
    factors = {group: np.ones(net.shapes[group][-1]) for group in groups.free}
    for _ in range(_ROUNDS):
        moved = 0.0
        for group in groups.free:
            wanted = _wanted(groups, group, weights, factors[group], seen)
            step = wanted / factors[group]
            moved = max(moved, float(np.abs(np.log(step)).max()))
            for layer in groups.writers[group]:
                weights[layer.out] /= _by_output(layer, step)
                biases[layer.out] /= step
            for layer in groups.readers[group]:
                weights[layer.out] *= step
            factors[group] = wanted
        if moved < _SETTLED:
            break
    layers = tuple(
        replace(layer, weights=weights[layer.out].astype(np.float32), bias=biases[layer.out].astype(np.float32))
        if layer.has_weights
        else layer
        for layer in net.layers
    )
    return Net(layers, net.input, net.outputs, net.input_shape)


class _Groups:
    """Tensors that must share their factors, named by one of them, with the layers that write and read them."""

    def __init__(self, net: Net) -> None:
        self._parent = {name: name for name in net.shapes}
        for layer in net.layers:
            if layer.kind is Kind.ADD or layer.kind in SAME_CHANNELS:
                for source in layer.inputs:
                    self._parent[self._root(source)] = self._root(layer.out)
        fixed = {self._root(name) for name in (net.input, *net.outputs.values())}
        for layer in net.layers:
            if layer.kind in (Kind.SUBTRACT, Kind.SIGMOID, Kind.SOFTMAX, Kind.RESHAPE):
                fixed |= {self._root(layer.out), self._root(layer.inputs[0])}
        roots = dict.fromkeys(self._root(name) for name in net.shapes)
        weighted = [layer for layer in net.layers if layer.has_weights]
        self.writers = {root: [one for one in weighted if self._root(one.out) == root] for root in roots}
        self.readers = {root: [one for one in weighted if self._root(one.inputs[0]) == root] for root in roots}
        self.tensors = {root: [name for name in net.shapes if self._root(name) == root] for root in roots}
        self.clipping = {self._root(one.out) for one in net.layers if one.activation is Activation.RELU6}
        self.free = [root for root in roots if root not in fixed and self.writers[root] and self.readers[root]]

    def _root(self, name: str) -> str:
        while self._parent[name] != name:
            name = self._parent[name]
        return name


def _wanted(
    groups: _Groups, group: str, weights: Mapping[str, Array], factor: Array, seen: Mapping[str, Activity]
) -> Array:
    """The factors that put what is written and what is read at the same share of their tensors' largest."""
    largest = np.max([seen[name].largest for name in groups.tensors[group]], axis=0)
    written = _shares(_largest_by_output(one, weights[one.out]) for one in groups.writers[group])
    read = _shares(np.abs(weights[one.out]).max(axis=(0, 1, 2)) for one in groups.readers[group])
    if group not in groups.clipping:
        now = largest / factor
        written = np.maximum(written, now / max(now.max(), 1e-12))
    step = np.sqrt(np.maximum(written, 1e-6) / np.maximum(read, 1e-6))
    wanted = factor * np.clip(step, _LEAST, _MOST)
    if group not in groups.clipping:
        return np.asarray(wanted)
    clips = np.any([seen[name].clips for name in groups.tensors[group]], axis=0)
    level = np.exp(np.log(wanted[clips]).mean()) if clips.any() else 1.0
    floor = np.maximum(largest, 1e-4) / _CLIPS_AT
    return np.where(clips, 1.0, np.maximum(wanted / level, floor))


def _shares(sizes: Iterable[Array]) -> Array:
    return np.asarray(np.max([one / max(one.max(), 1e-12) for one in sizes], axis=0))


def _largest_by_output(layer: Layer, weights: Array) -> Array:
    others = tuple(axis for axis in range(4) if axis != layer.channel_axis)
    return np.asarray(np.abs(weights).max(axis=others))


def _by_output(layer: Layer, values: Array) -> Array:
    return values[:, None, None, None] if layer.kind is Kind.CONV else values

"""A network as a list of layers in the order they run: what the readers make and the writers take.

Activations are named tensors [1, height, width, channels]; weights are float32 arrays that travel with their layer.
Only the operators that the supported models use exist here, and a reader refuses anything else by name, so that no
writer ever meets a layer it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


class Kind(StrEnum):
    """What a layer computes."""

    CONV = "conv"
    DEPTHWISE = "depthwise"
    ADD = "add"
    RESIZE = "resize"
    SIGMOID = "sigmoid"
    SUBTRACT = "subtract"
    PAD = "pad"
    AVERAGE = "average"
    LARGEST = "largest"
    RESHAPE = "reshape"
    SOFTMAX = "softmax"


SAME_CODES = frozenset({Kind.RESIZE, Kind.PAD, Kind.AVERAGE, Kind.LARGEST, Kind.RESHAPE})
"""What only moves or mixes values: its output must keep its input's scale."""
SAME_CHANNELS = SAME_CODES - {Kind.RESHAPE}


class Activation(StrEnum):
    """What is fused behind a convolution or an addition."""

    NONE = "none"
    RELU = "relu"
    RELU6 = "relu6"


class Padding(StrEnum):
    """TensorFlow's two paddings."""

    SAME = "same"
    VALID = "valid"


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One operator. `weights` is [out, kh, kw, in] for a convolution and [1, kh, kw, channels] for a depthwise one.

    `size` is the output of a RESIZE or the window of a pool; `pads` are rows above, below, columns left, right.
    """

    kind: Kind
    out: str
    inputs: tuple[str, ...]
    weights: Array | None = None
    bias: Array | None = None
    stride: int = 1
    padding: Padding = Padding.SAME
    activation: Activation = Activation.NONE
    subtrahend: float = 0.0
    size: tuple[int, int] | None = None
    pads: tuple[int, int, int, int] = (0, 0, 0, 0)
    shape: Shape | None = None

    @property
    def kernel(self) -> Array:
        """The weights of a layer that has some."""
        if self.weights is None:
            raise ValueError(f"layer {self.out} ({self.kind}) has no weights")
        return self.weights

    @property
    def offset(self) -> Array:
        """The bias of a layer that has one."""
        if self.bias is None:
            raise ValueError(f"layer {self.out} ({self.kind}) has no bias")
        return self.bias

    @property
    def channel_axis(self) -> int:
        """The axis of `weights` that counts output channels."""
        return 0 if self.kind is Kind.CONV else 3

    @property
    def has_weights(self) -> bool:
        """Whether this is a convolution of either kind."""
        return self.kind in (Kind.CONV, Kind.DEPTHWISE)


@dataclass(frozen=True, slots=True)
class Net:
    """Layers in running order, with the tensors that a caller sees under their signature names."""

    layers: tuple[Layer, ...]
    input: str
    outputs: Mapping[str, str]
    input_shape: Shape
    shapes: Mapping[str, Shape] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", _infer_shapes(self))

    @property
    def tensors(self) -> tuple[str, ...]:
        """Every activation whose range must be known: all but the input and its shifted copy."""
        return tuple(layer.out for layer in self.layers if layer.kind is not Kind.SUBTRACT)


def _infer_shapes(net: Net) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {net.input: net.input_shape}
    for layer in net.layers:
        shapes[layer.out] = _shape_after(layer, shapes[layer.inputs[0]])
    return shapes


def _shape_after(layer: Layer, before: Shape) -> Shape:
    if layer.shape is not None:
        return layer.shape
    if len(before) != 4:
        return before
    batch, height, width, channels = before
    if layer.has_weights:
        rows, columns = layer.kernel.shape[1:3]
        channels = layer.kernel.shape[layer.channel_axis]
        height, width = _strided(height, rows, layer), _strided(width, columns, layer)
    elif layer.kind in (Kind.AVERAGE, Kind.LARGEST) and layer.size is not None:
        height, width = _strided(height, layer.size[0], layer), _strided(width, layer.size[1], layer)
    elif layer.kind is Kind.PAD:
        above, below, left, right = layer.pads
        height, width = height + above + below, width + left + right
    elif layer.size is not None:
        height, width = layer.size
    return (batch, height, width, channels)


def _strided(length: int, kernel: int, layer: Layer) -> int:
    covered = length if layer.padding is Padding.SAME else length - kernel + 1
    return -(-covered // layer.stride)


def multiply_accumulates(net: Net) -> int:
    """How many multiplications one frame costs."""
    total = 0
    for layer in net.layers:
        if layer.has_weights:
            _, height, width, _ = net.shapes[layer.out]
            total += height * width * int(np.prod(layer.kernel.shape))
    return total

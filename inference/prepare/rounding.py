"""Rounds weights one column at a time, spreading each error over the columns not rounded yet.

GPTQ (Frantar et al. 2022): what a layer's inputs do together decides which errors show. The inputs enter as their
second moments, summed picture by picture, so memory does not grow with the pictures.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from inference.prepare.calibrate import Pictures
from inference.prepare.graph import Array, Kind, Layer, Net, Padding
from inference.prepare.progress import bar
from inference.prepare.quantize import Codes
from inference.prepare.run import Runner
from inference.prepare.writer import write_float

_DAMPING = 0.01
# How many output pixels of a picture are looked at, about; more change nothing that can be measured.
_PIXELS = 256
_BLOCK = 64


def second_moments(net: Net, pictures: Pictures) -> dict[str, Array]:
    """Of each weighted layer's input columns: [k, k] for a convolution, [channels, k, k] for a depthwise one."""
    weighted = [layer for layer in net.layers if layer.has_weights]
    runner = Runner(write_float(net, watch=tuple(dict.fromkeys(layer.inputs[0] for layer in weighted))))
    sums: dict[str, Array] = {}
    rows: dict[str, int] = {}
    for values in runner.over(pictures()):
        for layer in weighted:
            columns = _columns(layer, values[layer.inputs[0]][0])
            squares = columns.swapaxes(-1, -2) @ columns
            if layer.out in sums:
                sums[layer.out] += squares
            else:
                sums[layer.out] = squares
            rows[layer.out] = rows.get(layer.out, 0) + columns.shape[-2]
    return {name: total.astype(np.float64) / rows[name] for name, total in sums.items()}


def round_together(net: Net, moments: Mapping[str, Array], *, per_channel: bool) -> dict[str, Codes]:
    """The codes of every weighted layer."""
    weighted = [layer for layer in net.layers if layer.has_weights]
    return {
        layer.out: _round(layer, moments[layer.out], per_channel=per_channel)
        for layer in bar(weighted, "round together", unit="layer")
    }


def _columns(layer: Layer, values: Array) -> Array:
    """What each output pixel reads: [pixels, k] for a convolution, [channels, pixels, k] for a depthwise one."""
    height, width, channels = values.shape
    rows, columns = layer.kernel.shape[1:3]
    stride = layer.stride
    if layer.padding is Padding.SAME:
        tall, wide = -(-height // stride), -(-width // stride)
        pad_y, pad_x = (max((n - 1) * stride + k - m, 0) for n, k, m in ((tall, rows, height), (wide, columns, width)))
        values = np.pad(values, ((pad_y // 2, pad_y - pad_y // 2), (pad_x // 2, pad_x - pad_x // 2), (0, 0)))
    else:
        tall, wide = -(-(height - rows + 1) // stride), -(-(width - columns + 1) // stride)
    # Neighbouring pixels say nearly the same: a grid of them is enough.
    stride *= max(1, round((tall * wide / _PIXELS) ** 0.5))
    tall, wide = (-(-side * layer.stride // stride) for side in (tall, wide))
    patches = [
        values[y : y + (tall - 1) * stride + 1 : stride, x : x + (wide - 1) * stride + 1 : stride].reshape(-1, channels)
        for y in range(rows)
        for x in range(columns)
    ]
    stacked = np.stack(patches, axis=1)
    return stacked.reshape(len(stacked), -1) if layer.kind is Kind.CONV else stacked.transpose(2, 0, 1)


def _round(layer: Layer, moments: Array, *, per_channel: bool) -> Codes:
    matrix = _matrix(layer)
    largest = np.abs(matrix).max(axis=1) if per_channel else np.abs(matrix).max(keepdims=True).ravel()
    scales = np.maximum(largest, 1e-9) / 127
    width = matrix.shape[1]
    damping = _DAMPING * np.trace(moments, axis1=-2, axis2=-1)[..., None, None] / width + 1e-12
    moments = moments + np.eye(width) * damping
    order = np.argsort(-np.diag(moments)) if layer.kind is Kind.CONV else np.arange(width)
    moments = moments[..., order[:, None], order]
    upper = np.linalg.cholesky(np.linalg.inv(moments)).swapaxes(-1, -2)
    if upper.ndim == 2:
        upper = upper[None]
    matrix = matrix[:, order]
    codes = np.zeros_like(matrix)
    # Column by column inside a block; what the block did to all later columns follows in one product.
    for start in range(0, width, _BLOCK):
        end = min(start + _BLOCK, width)
        errors = np.empty((len(matrix), end - start))
        for column in range(start, end):
            codes[:, column] = np.clip(np.round(matrix[:, column] / scales), -127, 127)
            error = (matrix[:, column] - codes[:, column] * scales) / upper[:, column, column]
            matrix[:, column + 1 : end] -= error[:, None] * upper[:, column, column + 1 : end]
            errors[:, column - start] = error
        if end < width:
            matrix[:, end:] -= errors @ upper[0, start:end, end:]
    restored = np.empty_like(codes)
    restored[:, order] = codes
    return Codes(_weights(layer, restored).astype(np.int8), scales)


def _matrix(layer: Layer) -> Array:
    """Weights with one row an output channel."""
    kernel = layer.kernel.astype(np.float64)
    if layer.kind is Kind.CONV:
        return np.reshape(kernel, (kernel.shape[0], -1))
    return np.ascontiguousarray(np.reshape(kernel[0], (-1, kernel.shape[3])).T)


def _weights(layer: Layer, matrix: Array) -> Array:
    return np.reshape(matrix if layer.kind is Kind.CONV else matrix.T, layer.kernel.shape)

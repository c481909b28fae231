"""Pixels to tensors and back: the crop of a frame that the model sees, and the affine int8 codes.

Pure. Frames are uint8[height, width, 3], RGB. What lies outside the frame is black, as in MoveNet's training.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from inference.pose import Crop

Array = npt.NDArray[Any]

INPUT_SIZE = 192


def cut(frame: Array, crop: Crop, size: int = INPUT_SIZE) -> Array:
    """The square `crop` of `frame`, resized to uint8[size, size, 3]."""
    # Imported here because a worker needs this module's dequantize and never a picture library.
    from PIL import Image

    if crop.size <= 0 or not math.isfinite(crop.size):
        raise ValueError(f"a crop needs a positive size, not {crop.size}")
    height, width = frame.shape[:2]
    columns = _covered(crop.x0, crop.size, width, size)
    rows = _covered(crop.y0, crop.size, height, size)
    out = np.zeros((size, size, 3), np.uint8)
    if columns is None or rows is None:
        return out
    (left, right, x0, x1), (top, bottom, y0, y1) = columns, rows
    picture = Image.fromarray(frame).resize(
        (right - left, bottom - top), Image.Resampling.BILINEAR, box=(x0, y0, x1, y1)
    )
    out[top:bottom, left:right] = np.asarray(picture)
    return out


def _covered(origin: float, length: float, limit: int, size: int) -> tuple[int, int, float, float] | None:
    """The output pixels whose whole source lies inside 0..limit, and that source's bounds; None when there are none."""
    step = length / size
    first = max(0, math.ceil(-origin / step - 1e-6))
    last = min(size, math.floor((limit - origin) / step + 1e-6))
    if last <= first:
        return None
    return first, last, max(0.0, origin + first * step), min(float(limit), origin + last * step)


def quantize(values: Array, scale: float, zero_point: int, dtype: npt.DTypeLike = np.int8) -> Array:
    """The codes of real `values` under an affine quantization, rounded half to even and saturated."""
    limits = np.iinfo(np.dtype(dtype))
    return np.clip(np.round(values / scale) + zero_point, limits.min, limits.max).astype(dtype)


def dequantize(codes: Array, scale: float, zero_point: int) -> Array:
    """The real values of `codes`, as float32; unquantized tensors (scale 0) come back as they are."""
    if not scale:
        return codes
    return np.asarray((codes.astype(np.float32) - zero_point) * np.float32(scale))

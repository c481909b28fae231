"""Pose maths: MoveNet's heads become 17 points, points become the next crop, and two poses are compared.

Pure: values in, values out. A pose is float32[17, 3], rows in COCO order, columns (y, x, score); y and x are fractions
of the model's square input until `to_frame` turns them into pixels of the camera's frame; scores lie in 0..1.
`decode_heads` is the part of MoveNet that no NPU takes (argmax, gather, square root), which is why the model is cut
before it. The crop follows the person as MoveNet's own reference does, and falls back to the whole frame.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

KEYPOINT_NAMES = (
    "nose",
    "left_eye",
    "right_eye",
    "left_ear",
    "right_ear",
    "left_shoulder",
    "right_shoulder",
    "left_elbow",
    "right_elbow",
    "left_wrist",
    "right_wrist",
    "left_hip",
    "right_hip",
    "left_knee",
    "right_knee",
    "left_ankle",
    "right_ankle",
)
POINTS = len(KEYPOINT_NAMES)
_INDEX = {name: row for row, name in enumerate(KEYPOINT_NAMES)}


def _edges(*chains: str) -> tuple[tuple[int, int], ...]:
    pairs = []
    for chain in chains:
        names = chain.split()
        pairs += [(_INDEX[a], _INDEX[b]) for a, b in pairwise(names)]
    return tuple(pairs)


SKELETON = _edges(
    "left_ear left_eye nose right_eye right_ear",
    "left_wrist left_elbow left_shoulder right_shoulder right_elbow right_wrist",
    "left_shoulder left_hip right_hip right_shoulder",
    "left_hip left_knee left_ankle",
    "right_hip right_knee right_ankle",
)
"""Pairs of rows that a drawing joins with a line."""

# COCO's per-keypoint deviations; OKS uses twice these.
_SIGMAS = np.array(
    [
        0.026,
        0.025,
        0.025,
        0.035,
        0.035,
        0.079,
        0.079,
        0.072,
        0.072,
        0.062,
        0.062,
        0.107,
        0.107,
        0.087,
        0.087,
        0.089,
        0.089,
    ],
    np.float32,
)
_TORSO = [_INDEX[name] for name in ("left_shoulder", "right_shoulder", "left_hip", "right_hip")]

MIN_CROP_SCORE = 0.2
"""Points below this do not steer the crop (the value of MoveNet's reference)."""
MIN_VISIBLE_SCORE = 0.3
"""Points below this are not drawn and not compared."""
_TORSO_MARGIN = 1.9
_BODY_MARGIN = 1.2
_MIN_CROP_PX = 32.0
# The heatmap is divided by the distance from the regressed point plus this many cells, so that a strong far peak of
# another person loses to a weaker near one. A constant of MoveNet's graph.
_DISTANCE_OFFSET = 1.8


@dataclass(frozen=True, slots=True)
class Crop:
    """A square of the frame, in pixels; it may reach beyond the frame, where the model sees black."""

    x0: float
    y0: float
    size: float


@lru_cache(maxsize=4)
def _grid(height: int, width: int) -> tuple[Array, Array]:
    return (
        np.arange(height, dtype=np.float32)[:, None, None],
        np.arange(width, dtype=np.float32)[None, :, None],
    )


def decode_heads(center: Array, regress: Array, heatmap: Array, offset: Array, centre_weight: Array) -> Array:
    """The pose of the person nearest the middle, from dequantized heads [(1,) 48, 48, 1 or 34 or 17 or 34]."""
    height, width = centre_weight.shape
    heat = heatmap.reshape(height, width, POINTS)
    row, column = divmod(int((center.reshape(height, width) * centre_weight).argmax()), width)
    coarse = regress.reshape(height, width, POINTS, 2)[row, column]
    rows, columns = _grid(height, width)
    distance = np.sqrt((rows - (row + coarse[:, 0])) ** 2 + (columns - (column + coarse[:, 1])) ** 2)
    weighted = heat / (distance + np.float32(_DISTANCE_OFFSET))
    peak_row, peak_column = np.divmod(weighted.reshape(-1, POINTS).argmax(axis=0), width)
    points = np.arange(POINTS)
    fine = offset.reshape(height, width, POINTS, 2)[peak_row, peak_column, points]
    pose = np.empty((POINTS, 3), np.float32)
    pose[:, 0] = (peak_row + fine[:, 0]) / height
    pose[:, 1] = (peak_column + fine[:, 1]) / width
    pose[:, 2] = heat[peak_row, peak_column, points]
    return pose


def to_frame(pose: Array, crop: Crop) -> Array:
    """The same pose with y and x in pixels of the frame that `crop` was cut from."""
    scale = np.array([crop.size, crop.size, 1.0], np.float32)
    origin = np.array([crop.y0, crop.x0, 0.0], np.float32)
    return np.asarray(pose * scale + origin, np.float32)


def initial_crop(frame_size: tuple[int, int]) -> Crop:
    """The whole frame (width, height), centred in the smallest square that holds it."""
    width, height = frame_size
    size = float(max(width, height))
    return Crop((width - size) / 2, (height - size) / 2, size)


def next_crop(pose_px: Array, frame_size: tuple[int, int]) -> Crop:
    """Where to look in the next frame, given this frame's pose in pixels; the whole frame when no torso is seen.

    The square is centred between the hips and holds 1.9 times the torso's and 1.2 times the body's reach.
    """
    whole = initial_crop(frame_size)
    seen = pose_px[:, 2] > MIN_CROP_SCORE
    left_shoulder, right_shoulder, left_hip, right_hip = (bool(seen[row]) for row in _TORSO)
    if not ((left_shoulder or right_shoulder) and (left_hip or right_hip)):
        return whole
    centre = pose_px[[_INDEX["left_hip"], _INDEX["right_hip"]], :2].mean(axis=0)
    reach = np.abs(pose_px[:, :2] - centre)
    width, height = frame_size
    centre_y, centre_x = float(centre[0]), float(centre[1])
    half = max(
        _TORSO_MARGIN * float(reach[_TORSO].max()),
        _BODY_MARGIN * float(reach[seen].max()),
        _MIN_CROP_PX / 2,
    )
    half = min(half, max(centre_x, width - centre_x, centre_y, height - centre_y))
    if half > whole.size / 2:
        return whole
    return Crop(centre_x - half, centre_y - half, 2 * half)


def oks(pose: Array, reference: Array, area: float | None = None) -> float:
    """Object keypoint similarity 0..1 of `pose` with `reference`, over the points the reference sees.

    Both in the same units. `area` is the person's, in those units squared; by default the bounding box of the
    reference's visible points. 0 when the reference sees nobody.
    """
    visible = reference[:, 2] >= MIN_VISIBLE_SCORE
    if not visible.any():
        return 0.0
    points = reference[visible, :2].astype(np.float64)
    if area is None:
        area = float(np.prod(np.maximum(np.ptp(points, axis=0), 1e-3)))
    squared = ((pose[visible, :2] - points) ** 2).sum(axis=1)
    per_point = np.exp(-squared / (2 * area * (2 * _SIGMAS[visible].astype(np.float64)) ** 2))
    return float(per_point.mean()) if np.isfinite(per_point).all() else 0.0


def golden_oks(pose: Array, golden: Array) -> float:
    """`oks`, where a point that this pose scores under half of what the golden pose did counts as not found.

    Positions alone would let a model with a dead heatmap pass: the regressed points are roughly right without it.
    """
    visible = golden[:, 2] >= MIN_VISIBLE_SCORE
    if not visible.any():
        return 0.0
    found = pose[visible, 2] >= 0.5 * golden[visible, 2]
    return oks(pose, golden) * float(found.mean())

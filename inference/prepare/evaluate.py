"""How near a prepared model is to the float one, on pictures nobody calibrated on.

Distances are fractions of the model's input; only points the float model is sure of count. A model that is far from
float is refused here, at the developer's desk, not by the board's golden frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from inference.errors import InferenceError
from inference.pose import MIN_VISIBLE_SCORE
from inference.prepare.graph import Array

Posing = Callable[[Array], Array]
MAX_DISTANCE = 0.03
"""Twice what a good int8 model shows, a tenth of what a collapsed one does."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Agreement with the float model."""

    pictures: int
    points: int
    distance_mean: float
    distance_p95: float
    score_error_mean: float

    def as_dict(self) -> dict[str, float]:
        """For model.json, rounded so that it does not carry noise."""
        return {name: round(value, 5) for name, value in asdict(self).items()}

    def summary(self) -> str:
        """For a person."""
        return (
            f"{self.points} points on {self.pictures} held-out pictures, distance to float {self.distance_mean:.4f} "
            f"(p95 {self.distance_p95:.4f}), score error {self.score_error_mean:.3f}"
        )


def compare(poses: Sequence[Array], float_poses: Sequence[Array]) -> Accuracy:
    """Compare poses of the same pictures."""
    ours, theirs = np.stack(poses), np.stack(float_poses)
    sure = theirs[..., 2] >= MIN_VISIBLE_SCORE
    if not sure.any():
        raise InferenceError(
            "cannot judge the model: the float model finds nobody on the held-out pictures",
            "give pictures with a person in the middle with --heldout",
        )
    distance = np.linalg.norm(ours[..., :2] - theirs[..., :2], axis=-1)[sure]
    return Accuracy(
        pictures=len(poses),
        points=int(sure.sum()),
        distance_mean=float(distance.mean()),
        distance_p95=float(np.percentile(distance, 95)),
        score_error_mean=float(np.abs(ours[..., 2] - theirs[..., 2]).mean()),
    )


def require(accuracy: Accuracy, step: str) -> None:
    """Refuse a degenerate model, naming the step that broke it."""
    if not accuracy.distance_mean <= MAX_DISTANCE:
        raise InferenceError(
            f"cannot accept the model: after the step '{step}' its points are {accuracy.distance_mean:.3f} of the "
            f"input from the float model's, more than {MAX_DISTANCE}",
            "calibrate with more pictures of what the camera will see",
        )


def clearest(pictures: Sequence[Array], float_poses: Sequence[Array]) -> Array:
    """The picture whose person the float model sees best: a golden frame."""
    return pictures[int(np.argmax([pose[:, 2].min() + pose[:, 2].mean() for pose in float_poses]))]

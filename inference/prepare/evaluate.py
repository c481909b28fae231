"""How near a prepared model is to the float one, on pictures nobody calibrated on, and whether that is near enough.

Each kind of answer has its own measure: points and scores of a pose, the first class of a classification; anything
else has `channels`. The limits are requirements, fixed before anything was measured. A model beyond them is refused
here, at the developer's desk, and the refusal names the step that broke it: each step is judged with the limits of the
last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

from inference.errors import InferenceError
from inference.pose import MIN_VISIBLE_SCORE
from inference.prepare.graph import Array

_RESAMPLES = 1000
# Fewer pictures say nothing about others of their kind: one picture would give an interval of no width.
_LEAST_PICTURES = 10


class Agreement(Protocol):
    """What one comparison found."""

    def as_dict(self) -> Mapping[str, object]:
        """For model.json, rounded so that it does not carry noise."""

    def summary(self) -> str:
        """For a person."""

    def excess(self, limits: Mapping[str, float]) -> str:
        """How it breaks the limits; empty when it keeps them."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Of poses. Distances are fractions of the model's input; only points the float model is sure of count.

    `distance_low` and `distance_high` bound the mean with 95 % confidence, other pictures of that kind being drawn;
    None where the pictures are too few to say.
    """

    pictures: int
    points: int
    distance_mean: float
    distance_low: float | None
    distance_high: float | None
    distance_p95: float
    score_error_mean: float

    def as_dict(self) -> dict[str, float]:
        """See `Agreement`."""
        return _rounded(asdict(self))

    def summary(self) -> str:
        """See `Agreement`."""
        return (
            f"{self.points} points on {self.pictures} held-out pictures, distance to float {self.distance_mean:.4f} "
            f"({_between(self.distance_low, self.distance_high, '.4f')}, p95 {self.distance_p95:.4f}), "
            f"score error {self.score_error_mean:.3f}"
        )

    def excess(self, limits: Mapping[str, float]) -> str:
        """See `Agreement`."""
        if not self.distance_mean <= limits["max_distance_mean"]:
            limit = limits["max_distance_mean"]
            return f"its points are {self.distance_mean:.3f} of the input from the float model's, more than {limit}"
        if not self.score_error_mean <= limits["max_score_error_mean"]:
            limit = limits["max_score_error_mean"]
            return f"its scores are {self.score_error_mean:.2f} from the float model's, more than {limit}"
        return ""


@dataclass(frozen=True, slots=True)
class FirstClass:
    """Of classifications: how often both name the same class first, with the 95 % interval of that share."""

    pictures: int
    top1_agreement: float
    top1_low: float | None
    top1_high: float | None
    score_error_mean: float

    def as_dict(self) -> dict[str, float]:
        """See `Agreement`."""
        return _rounded(asdict(self))

    def summary(self) -> str:
        """See `Agreement`."""
        return (
            f"the same first class on {self.top1_agreement:.1%} of {self.pictures} held-out pictures "
            f"({_between(self.top1_low, self.top1_high, '.1%')}), error of its score {self.score_error_mean:.3f}"
        )

    def excess(self, limits: Mapping[str, float]) -> str:
        """See `Agreement`."""
        if self.top1_agreement >= limits["min_top1_agreement"]:
            return ""
        return (
            f"it names the float model's first class on {self.top1_agreement:.1%} of the pictures, "
            f"less than {limits['min_top1_agreement']:.0%}"
        )


def compare_poses(poses: Sequence[Array], float_poses: Sequence[Array]) -> Accuracy:
    """Compare poses float32[17, 3] of the same pictures."""
    ours, theirs = np.stack(poses), np.stack(float_poses)
    sure = theirs[..., 2] >= MIN_VISIBLE_SCORE
    if not sure.any():
        raise InferenceError(
            "cannot judge the model: the float model finds nobody on the held-out pictures",
            "give pictures with a person in the middle with --heldout",
        )
    distance = np.linalg.norm(ours[..., :2] - theirs[..., :2], axis=-1)
    low, high = _interval(np.where(sure, distance, 0).sum(axis=1), sure.sum(axis=1))
    return Accuracy(
        pictures=len(poses),
        points=int(sure.sum()),
        distance_mean=float(distance[sure].mean()),
        distance_low=low,
        distance_high=high,
        distance_p95=float(np.percentile(distance[sure], 95)),
        score_error_mean=float(np.abs(ours[..., 2] - theirs[..., 2]).mean()),
    )


def compare_scores(scores: Sequence[Array], float_scores: Sequence[Array]) -> FirstClass:
    """Compare class scores float32[classes] of the same pictures."""
    ours, theirs = np.stack(scores), np.stack(float_scores)
    first = theirs.argmax(axis=1)
    agreement = float((ours.argmax(axis=1) == first).mean())
    rows = np.arange(len(first))
    low, high = _wilson(agreement, len(first))
    return FirstClass(len(first), agreement, low, high, float(np.abs(ours[rows, first] - theirs[rows, first]).mean()))


def require(found: Agreement, limits: Mapping[str, float], step: str) -> None:
    """Refuse a degenerate model, naming the step that broke it."""
    excess = found.excess(limits)
    if excess:
        raise InferenceError(
            f"cannot accept the model: after the step '{step}' {excess}",
            "calibrate with more pictures of what the camera will see",
        )


def _rounded(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in values.items() if value is not None}


def _between(low: float | None, high: float | None, form: str) -> str:
    if low is None or high is None:
        return f"no interval of fewer than {_LEAST_PICTURES} pictures"
    return f"{low:{form}} to {high:{form}}"


def _interval(sums: Array, counts: Array) -> tuple[float, float] | tuple[None, None]:
    """The 95 % interval of a mean over pictures, by drawing the pictures again and again, always the same draws."""
    if len(sums) < _LEAST_PICTURES:
        return None, None
    draws = np.random.default_rng(0).integers(0, len(sums), (_RESAMPLES, len(sums)))
    means = sums[draws].sum(axis=1) / np.maximum(counts[draws].sum(axis=1), 1)
    return float(np.percentile(means, 2.5)), float(np.percentile(means, 97.5))


def _wilson(share: float, count: int) -> tuple[float, float] | tuple[None, None]:
    """Wilson's 95 % interval of a share, which is right near 100 % too."""
    if count < _LEAST_PICTURES:
        return None, None
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, middle - half), min(1.0, middle + half)

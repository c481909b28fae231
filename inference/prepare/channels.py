"""How like the float model's are outputs whose meaning nobody here knows: each channel by itself, the worst counts.

Taken together, a large output hides a dead small one, and what a place always says hides that it says nothing more. So
every value is centred on the float model's mean at its place over the held-out pictures, and each channel of the last
axis has a similarity of its own: 1 where it moves as in float, 0 where it is constant. A channel that float itself
never moves has nothing to lose and is left out. Pictures are taken one at a time; memory does not grow with their
number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from inference.errors import InferenceError
from inference.prepare.graph import Array

# Rounding in float32 moves a constant by less.
_FLAT = 1e-12


@dataclass(frozen=True, slots=True)
class Similarity:
    """The cosine between the worst channel and float's, both centred on float's mean; and each output's least one."""

    pictures: int
    worst: str
    similarity: float
    is_constant: bool
    outputs: Mapping[str, float]

    def as_dict(self) -> dict[str, object]:
        """See `Agreement`."""
        outputs = {name: round(value, 5) for name, value in self.outputs.items()}
        return {
            "pictures": self.pictures,
            "similarity": round(self.similarity, 5),
            "worst": self.worst,
            "outputs": outputs,
        }

    def summary(self) -> str:
        """See `Agreement`."""
        return f"{self.worst} is {self.similarity:.4f} like float on {self.pictures} held-out pictures, all others more"

    def excess(self, limits: Mapping[str, float]) -> str:
        """See `Agreement`."""
        least = limits["min_similarity"]
        if self.similarity >= least:
            return ""
        if self.is_constant:
            return f"{self.worst} is constant"
        return f"{self.worst} is {self.similarity:.3f} like the float model's, less than {least}"


def compare_channels(pairs: Iterable[tuple[Mapping[str, Array], Mapping[str, Array]]]) -> Similarity:
    """Compare outputs by name, ours and float's, of the same pictures."""
    sums: dict[str, _Sums] = {}
    pictures = 0
    for ours, theirs in pairs:
        pictures += 1
        for name, exact in theirs.items():
            if name not in sums:
                sums[name] = _Sums(ours[name], exact)
            sums[name].add(ours[name], exact)
    judged = {name: one.similarities(pictures) for name, one in sums.items()}
    least = {name: float(np.nanmin(found)) for name, found in judged.items() if not np.isnan(found).all()}
    if not least:
        raise constant_float()
    output = min(least, key=lambda name: least[name])
    channel = int(np.nanargmin(judged[output]))
    worst = (f"channel {channel} of " if len(judged[output]) > 1 else "") + f"output '{output}'"
    return Similarity(pictures, worst, least[output], not sums[output].moved[channel], least)


def constant_float() -> InferenceError:
    """A model that always says the same cannot be judged."""
    return InferenceError(
        "cannot judge the model: the float model answers the same to every held-out picture",
        "check the input range, and that the held-out pictures differ",
    )


class _Sums:
    """Of one output: sums over pictures, for each value or each channel, of what differs from the first picture."""

    def __init__(self, ours: Array, theirs: Array) -> None:
        self._first, self._base = _by_channel(ours), _by_channel(theirs)
        channels = self._base.shape[1]
        self._ours, self._theirs = np.zeros_like(self._base), np.zeros_like(self._base)
        self._products = np.zeros((3, channels))
        self.moved = np.zeros(channels, bool)

    def add(self, ours: Array, theirs: Array) -> None:
        """One picture more."""
        mine = _by_channel(ours)
        self.moved |= (mine != self._first).any(axis=0)
        y, x = mine - self._base, _by_channel(theirs) - self._base
        self._ours += y
        self._theirs += x
        self._products += [(x * x).sum(axis=0), (y * y).sum(axis=0), (x * y).sum(axis=0)]

    def similarities(self, pictures: int) -> Array:
        """Of each channel; NaN where float is flat, -1 where ours is no number."""
        mean = self._theirs / pictures
        squares = pictures * (mean * mean).sum(axis=0)
        crossed = (mean * self._ours).sum(axis=0)
        own = self._products[0] - squares
        other = np.maximum(self._products[1] - 2 * crossed + squares, 0)
        cosine = (self._products[2] - crossed) / np.sqrt(np.maximum(own * other, 1e-300))
        flat = own <= _FLAT * pictures * (self._base * self._base).sum(axis=0)
        return np.where(flat, np.nan, np.where(np.isfinite(cosine), np.clip(cosine, -1, 1), -1.0))


def _by_channel(values: Array) -> Array:
    return np.asarray(values, np.float64).reshape(-1, values.shape[-1] if values.ndim else 1)

"""Learns the range of every tensor from pictures, one picture at a time: memory does not grow with their number.

Two passes over the same pictures. The first finds each tensor's extremes; the second, only where a percentile is asked
for, counts values into bins between them. Extremes of a picture's background widen a range that a percentile keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from inference.prepare.graph import Array, Net
from inference.prepare.run import Runner
from inference.prepare.writer import write_float

_BINS = 4096
Pictures = Callable[[], Iterable[Array]]


@dataclass(frozen=True, slots=True)
class Range:
    """What a tensor's values span."""

    low: float
    high: float


def extremes(net: Net, pictures: Pictures) -> dict[str, Range]:
    """The least and the greatest value of every tensor over all pictures."""
    runner = Runner(write_float(net, watch=net.tensors))
    ranges: dict[str, Range] = {}
    for values in runner.over(pictures()):
        for name in net.tensors:
            low, high = float(values[name].min()), float(values[name].max())
            known = ranges.get(name, Range(low, high))
            ranges[name] = Range(min(low, known.low), max(high, known.high))
    return ranges


def percentiles(
    net: Net, pictures: Pictures, known: Mapping[str, Range], names: Iterable[str], percent: float
) -> dict[str, Range]:
    """The range of each named tensor that holds all but 100 - `percent` of its values at either end."""
    watched = tuple(names)
    counts = {name: np.zeros(_BINS, np.int64) for name in watched}
    runner = Runner(write_float(net, watch=watched))
    for values in runner.over(pictures()):
        for name in watched:
            span = (known[name].low, max(known[name].high, known[name].low + 1e-6))
            counts[name] += np.histogram(values[name], _BINS, span)[0]
    return {name: _between(counts[name], known[name], percent) for name in watched}


def _between(counts: Array, known: Range, percent: float) -> Range:
    share = np.cumsum(counts) / counts.sum()
    step = (known.high - known.low) / _BINS
    high = known.low + step * (int(np.searchsorted(share, percent / 100)) + 1)
    # A tensor that never goes below zero (after a ReLU) must keep zero as its end.
    low = known.low + step * int(np.searchsorted(share, 1 - percent / 100)) if known.low < 0 else 0.0
    return Range(low, min(high, known.high))

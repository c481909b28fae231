"""Whether a benchmark says that something grows."""

from __future__ import annotations

import pytest

from bench.growth import growth

NOISE = (3.0, -2.0, 1.0, -3.0, 2.0, -1.0, 0.5, -0.5, 2.5, -2.5, 1.5, -1.5)


def test_a_steady_count_does_not_grow_and_its_slope_is_exact() -> None:
    found = growth([(float(minute), 7.0) for minute in range(10)], 0.05)
    assert (found.slope, found.half, found.grows) == (0.0, 0.0, False)


def test_noise_does_not_grow() -> None:
    assert not growth([(float(minute), 100 + noise) for minute, noise in enumerate(NOISE)], 0.05).grows


def test_a_leak_above_the_noise_is_seen_and_measured() -> None:
    found = growth([(float(minute), 100 + 4 * minute + noise) for minute, noise in enumerate(NOISE)], 0.05)
    assert found.grows
    assert abs(found.slope - 4) < found.half < 1


def test_the_interval_of_a_line_is_students() -> None:
    # By hand: slope 34.6 / 17.5, residual sum of squares 0.15086; from the tables t(0.05, 4) = 2.776.
    points = [(0.0, 0.0), (1.0, 2.2), (2.0, 3.8), (3.0, 6.2), (4.0, 7.8), (5.0, 10.0)]
    found = growth(points, 0.05)
    assert found.slope == pytest.approx(34.6 / 17.5)
    assert found.half == pytest.approx(2.776 * (0.15086 / 4 / 17.5) ** 0.5, rel=0.005)


def test_too_little_says_nothing() -> None:
    with pytest.raises(ValueError, match="a slope with an interval needs 6 points, not 3"):
        growth([(0.0, 1.0), (1.0, 1.0), (2.0, 1.0)], 0.05)

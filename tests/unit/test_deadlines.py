"""Deadlines are learned, and stay between the profile's floor and ceiling."""

from __future__ import annotations

import pytest

from inference.deadlines import Latencies, Limits, first_invoke_s

LIMITS = Limits(
    create_s=20,
    prepare_s=30,
    first_invoke_s=60,
    soft_ms_floor=20,
    soft_ms_ceiling=200,
    soft_factor=3,
    hard_factor=4,
)


def filled(latency_ms: float, count: int = 100) -> Latencies:
    latencies = Latencies()
    for _ in range(count):
        latencies.add(latency_ms)
    return latencies


@pytest.mark.parametrize(
    ("latencies", "soft_s"),
    [
        (Latencies(), 0.2),
        (filled(5, count=49), 0.2),
        (filled(30), 0.09),
        (filled(5), 0.02),
        (filled(500), 0.2),
    ],
    ids=["nothing seen", "too few seen", "learned", "not below the floor", "not above the ceiling"],
)
def test_the_soft_deadline(latencies: Latencies, soft_s: float) -> None:
    assert latencies.soft_s(LIMITS) == pytest.approx(soft_s)
    assert latencies.hard_s(LIMITS) == pytest.approx(4 * soft_s)


def test_a_device_that_became_slower_for_good_gets_a_longer_deadline() -> None:
    latencies = filled(10, count=1000)
    before = latencies.soft_s(LIMITS)
    for _ in range(50):
        latencies.add(50)
    assert latencies.soft_s(LIMITS) > before


def test_percentiles_of_nothing_are_zero() -> None:
    assert Latencies().percentiles() == {"p50": 0.0, "p95": 0.0, "p99": 0.0}


def test_percentiles_are_those_of_the_last_thousand() -> None:
    latencies = filled(999, count=500)
    for value in range(1000):
        latencies.add(float(value))
    assert latencies.percentiles() == {"p50": 500.0, "p95": 949.0, "p99": 989.0}


@pytest.mark.parametrize(
    ("longest_seen_s", "allowed_s"),
    [(None, 60.0), (0.01, 1.0), (5.0, 15.0), (50.0, 60.0)],
    ids=["unknown", "never under a second", "three times what it took", "never over the profile's"],
)
def test_the_first_invoke_of_a_fresh_worker(longest_seen_s: float | None, allowed_s: float) -> None:
    assert first_invoke_s(LIMITS, longest_seen_s) == allowed_s

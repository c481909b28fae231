"""A service that systemd starts again and again is a problem, and one that crashed once a year is none."""

from __future__ import annotations

from collections.abc import Sequence

from agent.contract.status import ProblemEntry, ServiceEntry
from agent.restarts import Restarts


def life(counts: Sequence[tuple[float, int]]) -> list[ProblemEntry]:
    """What the last look says; counts as systemd has them, by time in seconds."""
    restarts = Restarts()
    problems: list[ProblemEntry] = []
    for now_s, count in counts:
        service: ServiceEntry = {
            "name": "pose.service",
            "load": "loaded",
            "active": "active",
            "sub": "running",
            "result": "success",
            "restarts": count,
        }
        problems = restarts.seen([service], now_s)
    return problems


def test_one_that_crashes_after_its_probation_is_named_with_both_ways_out() -> None:
    assert life([(at * 20.0, at) for at in range(7)]) == [
        {
            "code": "service-restarting",
            "message": "systemd has started pose.service again 6 times in the last 2 min",
            "remedy": "See why: journalctl -b -n 50 -u pose.service; the runtime before: avocadoctl rollback",
        }
    ]


def test_few_or_old_restarts_are_no_problem() -> None:
    assert life([(0, 0), (10, 2)]) == []
    assert life([(0, 7), (10, 7)]) == []  # before this agent looked
    assert life([(at * 3000.0, at) for at in range(9)]) == []


def test_it_is_over_when_the_service_has_run_for_long_or_was_started_anew() -> None:
    crashes = [(at * 20.0, at) for at in range(7)]
    assert life([*crashes, (3000.0, 6)]) != []
    assert life([*crashes, (4000.0, 6)]) == []
    assert life([*crashes, (150.0, 0)]) == []
    assert life([*crashes, (150.0, 0), (160.0, 3)]) != []

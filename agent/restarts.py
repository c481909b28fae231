"""Services that systemd starts again and again: what a probation of seconds cannot see, an hour of looking does.

Pure: counts and times go in. systemd's own count grows for as long as a service is not stopped, so one that crashed a
few times in a year is told from one that crashes every minute by when it grew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from agent.contract.status import ProblemEntry, ServiceEntry

WINDOW_S = 3600.0
TOO_MANY = 3


class Restarts:
    """What was seen within the window, service by service."""

    def __init__(self) -> None:
        self._grew: dict[str, deque[tuple[float, int]]] = {}  # when it was first seen at which count

    def seen(self, services: Iterable[ServiceEntry], now_s: float) -> list[ProblemEntry]:
        """Take in the counts of now, and name each service that was started again too often lately."""
        problems = []
        for service in services:
            name, count = service["name"], service["restarts"]
            grew = self._grew.setdefault(name, deque([(now_s, count)]))
            if count < grew[-1][1]:  # stopped and started by somebody: systemd counts anew
                grew.clear()
            if not grew or count != grew[-1][1]:
                grew.append((now_s, count))
            while len(grew) > 1 and grew[1][0] < now_s - WINDOW_S:
                grew.popleft()
            lately = count - grew[0][1]
            if lately >= TOO_MANY:
                problems.append(_restarting(name, lately, now_s - grew[0][0]))
        return problems


def _restarting(name: str, times: int, seconds: float) -> ProblemEntry:
    minutes = max(1, -(-int(min(seconds, WINDOW_S)) // 60))
    return {
        "code": "service-restarting",
        "message": f"systemd has started {name} again {times} times in the last {minutes} min",
        "remedy": f"See why: journalctl -b -n 50 -u {name}; the runtime before: avocadoctl rollback",
    }

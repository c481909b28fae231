"""A client that reads poses the whole time, as a viewer would, and says how long they stopped.

It holds one server-sent-events connection to the pose service, connects again as soon as the service is back, and
keeps what it saw with the time of arrival on this machine's monotonic clock. Gaps measured here include everything a
viewer waits for: the stop, the switch, the start, the first frame, and the way through the ssh tunnel.
"""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

RECONNECT_S = 0.02
READ_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One pose as it arrived: the client's monotonic time, and what the service said of it."""

    at: float
    sequence: int
    backend: str
    reason: str
    latency_ms: float
    points: list[list[float]]


class PoseReader:
    """Reads `/api/poses` in a thread until closed; `seen` only ever grows."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._address = (host, port)
        self._seen: list[Seen] = []
        self._arrived = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pose-reader", daemon=True)

    def __enter__(self) -> PoseReader:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(READ_TIMEOUT_S + 1)

    @property
    def seen(self) -> list[Seen]:
        """Everything that arrived so far."""
        with self._arrived:
            return list(self._seen)

    def wait_for(self, wanted: Any, timeout_s: float, since: float = 0.0) -> Seen:
        """The first pose after `since` for which `wanted(seen)` holds. Raises TimeoutError with what came instead."""
        deadline = time.monotonic() + timeout_s
        looked = 0
        with self._arrived:
            while True:
                for seen in self._seen[looked:]:
                    looked += 1
                    if seen.at > since and wanted(seen):
                        return seen
                left = deadline - time.monotonic()
                if left <= 0:
                    last = self._seen[-1] if self._seen else None
                    raise TimeoutError(f"no such pose within {timeout_s} s; the last of {len(self._seen)} was {last}")
                self._arrived.wait(left)

    def longest_gap_ms(self, start: float, end: float) -> float:
        """The longest time without a pose between two moments of the monotonic clock."""
        times = [start, *(seen.at for seen in self.seen if start < seen.at < end), end]
        return 1000 * max(later - earlier for earlier, later in itertools.pairwise(times))

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._read_once()
            except (OSError, http.client.HTTPException, ValueError):
                # The service is away: that is what this client measures. The gap shows up in `seen`.
                self._stop.wait(RECONNECT_S)

    def _read_once(self) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=READ_TIMEOUT_S)
        try:
            connection.request("GET", "/api/poses", headers={"Accept": "text/event-stream"})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise http.client.HTTPException(f"status {response.status}")
            while not self._stop.is_set():
                line = response.readline(1 << 16)
                if not line:
                    return
                if line.startswith(b"data:"):
                    self._take(json.loads(line[5:]))
        finally:
            connection.close()

    def _take(self, event: dict[str, Any]) -> None:
        if "points" not in event:
            return
        seen = Seen(
            time.monotonic(), event["seq"], event["backend"], event["reason"], event["latency_ms"], event["points"]
        )
        with self._arrived:
            self._seen.append(seen)
            self._arrived.notify_all()

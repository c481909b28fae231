"""Time, from the system: monotonic for deadlines, wall time for printing, and which boot this is."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SystemClock:
    """The Clock port on the real clock. `wait` sleeps; one that raises ends a step's wait when the agent stops."""

    def __init__(self, wait: Callable[[float], None] = time.sleep) -> None:
        self._wait = wait

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def now(self) -> str:
        """Wall time as RFC 3339 UTC."""
        return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def sleep(self, seconds: float) -> None:
        """Wait between two looks at a state."""
        self._wait(seconds)

    def boot_id(self) -> str:
        """The kernel's id of this boot, as a canonical UUID."""
        return BOOT_ID.read_text(encoding="ascii").strip()

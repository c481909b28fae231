"""Time, from the system: monotonic for deadlines, wall time for printing, and which boot this is."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SystemClock:
    """The Clock port on the real clock."""

    def monotonic(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    def now(self) -> str:
        """Wall time as RFC 3339 UTC."""
        return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def sleep(self, seconds: float) -> None:
        """Wait between two looks at a state."""
        time.sleep(seconds)

    def boot_id(self) -> str:
        """The kernel's id of this boot, as a canonical UUID."""
        return BOOT_ID.read_text(encoding="ascii").strip()

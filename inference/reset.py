"""How the unprivileged supervisor asks for a rung that needs root, and learns how it went.

The service may neither write to sysfs nor load modules nor reboot, and needs neither polkit nor the bus for it: it
writes one small file into its own runtime folder, systemd's `pose-reset.path` sees it, and `pose-reset.service` (root,
one shot, `avocado-infer reset`) does what the board's own profile allows. The answer is a file in a folder that only
root writes. Each request has a number, so that an old answer is never taken for a new one.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.policy import Rung

REQUEST = "reset-request"
ANSWER = Path("/run/avocado-pose-reset/answer.json")
_LIMIT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ResetAnswer:
    """Whether the rung was carried out, and in words what was done or why not."""

    rung: Rung
    done: bool
    message: str


class ResetDoor:
    """The asking side; one request at a time."""

    def __init__(self, request: Path, answer: Path) -> None:
        self._request = request
        self._answer = answer
        self._rung: Rung | None = None
        self._number = 0
        self._refusal = ""

    @property
    def waiting(self) -> bool:
        """Whether a request has no answer yet."""
        return self._rung is not None

    def ask(self, rung: Rung | None) -> None:
        """Ask for a rung. A folder that takes no file is an answer too."""
        self._rung, self._number, self._refusal = rung, time.monotonic_ns(), ""
        fresh = self._request.with_name(self._request.name + ".new")
        try:
            fresh.write_text(json.dumps({"number": self._number, "rung": rung}))
            fresh.replace(self._request)
        except OSError as error:
            self._refusal = f"{self._request}: {error.strerror}"

    def answer(self, *, overdue: bool) -> ResetAnswer | None:
        """The answer, once there is one; when `overdue`, the request is withdrawn and that is the answer."""
        rung = self._rung
        if rung is None:
            return None
        found = {"done": False, "message": self._refusal} if self._refusal else self._read()
        if found is None and overdue:
            self._request.unlink(missing_ok=True)
            found = {"done": False, "message": "nobody did it in time; is pose-reset.path active?"}
        if found is None:
            return None
        self._rung = None
        return ResetAnswer(rung, bool(found.get("done")), str(found.get("message", "")))

    def _read(self) -> dict[str, Any] | None:
        try:
            with self._answer.open("rb") as file:
                found = json.loads(file.read(_LIMIT_BYTES))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and found.get("number") == self._number else None

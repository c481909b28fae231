"""The one door through which the virtual board runs host programs, and the one way in which it waits.

Every program has a time limit and every wait a deadline; what did not happen becomes a `BoardError` that names it.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence

POLL_S = 0.02


class BoardError(Exception):
    """The virtual board could not do what was asked; the message says what, and shows the log where one helps."""


def run(
    argv: Sequence[str],
    *,
    doing: str,
    timeout_s: float = 30,
    input_text: str | None = None,
    check: bool = True,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. `doing` completes the sentence "cannot ..." should it fail or take too long."""
    standard_input = {"stdin": subprocess.DEVNULL} if input_text is None else {"input": input_text}
    try:
        done = subprocess.run(
            list(argv), **standard_input, capture_output=True, text=True, errors="replace", timeout=timeout_s, env=env
        )
    except subprocess.TimeoutExpired as late:
        raise BoardError(f"cannot {doing}: {argv[0]} did not end within {timeout_s:g} s") from late
    except FileNotFoundError as absent:
        raise BoardError(f"cannot {doing}: {argv[0]} is not installed") from absent
    if check and done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()
        raise BoardError(f"cannot {doing}: {argv[0]} ended with status {done.returncode}: " + "\n".join(said[-10:]))
    return done


def holds_within(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until `condition` holds; False when it still does not after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True

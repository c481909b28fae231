"""What a person sees while something long runs: one moving line on a terminal, plain lines elsewhere.

Everything here goes to stderr, so that stdout holds the result and nothing else. What a board says of itself is among
the words, so none of them reaches the terminal as more than a word.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

from agent.contract.errors import printable

_WIDTH = 24
_EVERY_S = 0.1


class Report:
    """Progress of one command. `say` is a line that stays, `show` one that is overwritten."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._moving = not quiet and self._stream.isatty()
        self._shown = False
        self._last = 0.0

    def say(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        if not self._quiet:
            print(printable(text), file=self._stream, flush=True)

    def show(self, text: str, done: int = 0, total: int = 0) -> None:
        """A line that the next one overwrites, with a bar when `total` is known. Nothing off a terminal."""
        now = time.monotonic()
        if not self._moving or (self._shown and done < total and now - self._last < _EVERY_S):
            return
        self._last = now
        self._shown = True
        bar = ""
        if total > 0:
            filled = min(_WIDTH, _WIDTH * done // total)
            bar = f" [{'#' * filled}{'.' * (_WIDTH - filled)}] {megabytes(done)} of {megabytes(total)}"
        self._stream.write(f"\r\x1b[K{printable(text)}{bar}")
        self._stream.flush()

    def clear(self) -> None:
        """The moving line is gone."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = False


def megabytes(count: int) -> str:
    """Bytes as a person reads them: `0.61 MB`, `12 kB`."""
    if count < 100_000:
        return f"{count / 1000:.0f} kB" if count >= 1000 else f"{count} B"
    return f"{count / 1e6:.2f} MB"

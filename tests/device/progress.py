"""What the person at the terminal sees while the board is built and booted; in a pipe, nothing at all."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TICK_S = 0.2


@contextmanager
def step(text: str) -> Iterator[None]:
    """Show `text` with the seconds it has taken so far, and keep the line when it is over."""
    if not sys.stderr.isatty():
        yield
        return
    began = time.monotonic()
    over = threading.Event()

    def draw(end: str = "") -> None:
        print(f"\r\x1b[K{text} ... {time.monotonic() - began:.1f} s", end=end, file=sys.stderr, flush=True)

    def tick() -> None:
        while not over.wait(TICK_S):
            draw()

    draw()
    ticking = threading.Thread(target=tick, daemon=True)
    ticking.start()
    try:
        yield
    finally:
        over.set()
        ticking.join()
        draw(end="\n")

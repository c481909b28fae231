"""`python -m tests.hostile.killed STATE URL`: fetches what the repository offers, and dies when it is told to.

For each number of seconds on standard input, a fresh process refreshes the repository and fetches its image; when it
has not ended by then, it is killed. One line says how it went: seconds it lived, and its exit status or signal.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

from agent.contract.manifest import Extension, parse_manifest
from agent.ports.fetch import HttpFetcher
from agent.ports.files import FileStore, write_durably
from agent.trust import Trust, open_source
from tests.hostile.board import NOW, QUICK


def fetch(state: Path, url: str) -> None:
    store = FileStore(state)
    trust = Trust(state / "metadata", "virtual", "x86_64", lambda: None, lambda: NOW, write_durably)
    source = open_source(HttpFetcher(url, limits=QUICK), trust, store)
    wanted = source.manifest().extensions[0]
    source.fetch(wanted, [base for base in bases(state) if store.verify_image(base)], lambda done, total: None)
    source.close()


def bases(state: Path) -> list[Extension]:
    """What the board runs now, as its stored manifest says."""
    path = state / "active.json"
    return list(parse_manifest(path.read_bytes()).extensions) if path.exists() else []


def attempt(state: Path, url: str, limit_s: float) -> tuple[float, int]:
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            fetch(state, url)
            status = 0
        finally:
            os._exit(status)
    with os.fdopen(os.pidfd_open(child), "rb") as ended:
        if not select.select([ended], [], [], limit_s)[0]:
            signal.pidfd_send_signal(ended.fileno(), signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    return time.monotonic() - began, os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    for line in sys.stdin:
        lived_s, status = attempt(Path(sys.argv[1]), sys.argv[2], float(line))
        print(f"{lived_s:.4f} {status}", flush=True)

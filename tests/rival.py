"""A process that publishes into a repository and stands still after its first transfer, until a line comes in.

`python -m tests.rival REPOSITORY KEYS NEW OLD`
"""

from __future__ import annotations

import sys
from pathlib import Path

from agent.host.keys import Keys
from agent.host.repository import publish
from tests.hostile import board


def main(repository: Path, keys: Path, new: Path, old: Path) -> None:
    """The delta is made, the full transfer not yet, and nothing is signed."""
    stood = False

    def stand_still(name: str, done: int, total: int) -> None:
        nonlocal stood
        if name.endswith(".full") and not stood:
            stood = True
            print("standing still", flush=True)
            sys.stdin.readline()

    offered = board.manifest(new.read_bytes())
    made = offered.extensions[0].image_id
    publish(repository, offered, {made: new}, {made: [old]}, Keys(keys), now=board.PUBLISHED, progress=stand_still)


main(*map(Path, sys.argv[1:]))

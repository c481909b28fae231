"""`python -m tests.device.held_server ROOT ADDRESS PORT CONTROL`: serves a folder, and holds an answer when told to.

While the file `CONTROL/hold` exists, the next answer for a path that fits its pattern waits: the file is then called
`held`, until whoever asked for it takes it away. Ends with its standard input.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.device.process import holds_within
from tests.hostile.server import Handler, serving

PATIENCE_S = 60


def main(root: str, address: str, port: str, control: str) -> None:
    hold, held = Path(control) / "hold", Path(control) / "held"

    def answer(handler: Handler, body: bytes) -> None:
        if hold.exists() and re.search(hold.read_text(), handler.path):
            hold.rename(held)
            holds_within(lambda: not held.exists(), PATIENCE_S)
        handler.honest(body)

    with serving(Path(root), address, int(port)) as server:
        server.rules["/"] = answer
        (Path(control) / "ready").touch()
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

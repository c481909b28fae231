"""A wall clock of the board's own: a library in the agent's environment, and a file on the board that sets it.

The board's kernel is the host's, and so is its clock, which no test may set. What is moved is the wall clock as the
programs of the board read it through libc, and that alone: the monotonic clock and the times of files stay true.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

from tests.device.board import Board
from tests.device.host import find_program
from tests.device.process import holds_within, run

SOURCE = Path(__file__).with_suffix(".c")
FOLDER = "/var/lib/fake-clock"
DROP_IN = "/run/systemd/system/avocadod.service.d/clock.conf"
ENVIRONMENT = {"LD_PRELOAD": f"{FOLDER}/fake_clock.so", "FAKE_CLOCK": f"{FOLDER}/shift"}
DEAD = datetime(1970, 1, 1, 0, 1, tzinfo=UTC)
FAR = datetime(2100, 1, 1, tzinfo=UTC)


def library(folder: Path) -> Path | None:
    """The library, made there; None where there is no C compiler."""
    compiler = find_program("cc", "gcc")
    if compiler is None:
        return None
    made = folder / "fake_clock.so"
    run([compiler, "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", str(made), str(SOURCE)], doing="make a clock")
    return made


class FakeClock:
    """The agent of one running board, restarted under a clock that `set` moves."""

    def __init__(self, board: Board, made: Path) -> None:
        self._board = board
        board.exec(["mkdir", "-p", FOLDER, str(Path(DROP_IN).parent)])
        board.put(made, f"{FOLDER}/{made.name}")
        self.shift(0)
        lines = [f"Environment={name}={value}" for name, value in ENVIRONMENT.items()]
        board.exec(["tee", DROP_IN], input_text="\n".join(["[Service]", *lines, ""]))
        board.exec(["systemctl", "daemon-reload"])
        self.restart_agent()

    def restart_agent(self) -> None:
        """As a board does that boots under this clock."""
        self._board.exec(["systemctl", "restart", "avocadod.service"])
        state = ["systemctl", "is-active", "--quiet", "avocadod.service"]
        assert holds_within(lambda: self._board.exec(state, check=False).returncode == 0, timeout_s=30)

    def set(self, to: datetime) -> None:
        """From now on the board's programs read this time, and it goes on from there."""
        self.shift(int(to.timestamp() - time.time()))

    def shift(self, seconds: int) -> None:
        """From now on they read the true time and so much more."""
        self._board.exec(["tee", f"{FOLDER}/new"], input_text=f"{seconds}\n")
        self._board.exec(["mv", f"{FOLDER}/new", f"{FOLDER}/shift"])

    def under(self, *argv: str) -> list[str]:
        """A command that runs on the board under its clock."""
        return ["env", *(f"{name}={value}" for name, value in ENVIRONMENT.items()), *argv]

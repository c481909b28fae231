"""The reference application on a virtual board, used the way its users do: through the installed commands.

`avocadoctl` runs as a program of its own, with the board's `ssh` first on PATH, so that what is shown or tested here
is what somebody types. A project lives in a folder of its own: keys, builds and the edited `avocado.yaml` of one
demonstration or test never meet another's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.device import rootfs
from tests.device.board import TREE, Board
from tests.device.process import BoardError, holds_within

FIRST_MODEL = TREE / "build/models/movenet-lightning-minmax"
NEW_MODEL = TREE / "build/models/movenet-lightning"
PAGE_PORT = 8080
BUILD_TIMEOUT_S = 600
DEPLOY_TIMEOUT_S = 300
BOARD = "root@board"


@dataclass(frozen=True, slots=True)
class Ran:
    """How one command ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def document(self) -> dict[str, Any]:
        """What `-o json` printed."""
        parsed = json.loads(self.stdout)
        if not isinstance(parsed, dict):
            raise BoardError(f"cannot read what was printed: not an object but {self.stdout[:200]!r}")
        return parsed


class Reference:
    """One project made from `examples/npu-pose`, and the commands that act on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._yaml = folder / "avocado.yaml"

    @classmethod
    def start(cls, folder: Path) -> Reference:
        """A fresh project with keys of its own. Images built before from the same inputs are built again only once."""
        shutil.rmtree(folder, ignore_errors=True)
        project = cls(folder)
        project.avocadoctl("init", "--reference", "npu-pose", str(folder))
        # The demonstration asks for unlocked keys; a real project has a passphrase.
        project.avocadoctl("keys", "init", "--keys", str(folder / "keys"), "--no-passphrase")
        project.use_model(FIRST_MODEL)
        return project

    def build(self) -> dict[str, Any]:
        """Build the runtime for the virtual target."""
        return self.avocadoctl("-o", "json", "build", "-C", str(self.folder), timeout_s=BUILD_TIMEOUT_S).document

    def provision(self, board: Board) -> None:
        """Put the first runtime into the board's root file system. The board is off."""
        board.provision(
            lambda root: void(
                self.avocadoctl("provision", str(root), "-C", str(self.folder), timeout_s=BUILD_TIMEOUT_S)
            )
        )

    def use_model(self, folder: Path) -> None:
        """Name another prepared model in avocado.yaml: the one line a user changes."""
        lines = self._yaml.read_text(encoding="utf-8").splitlines(keepends=True)
        at = [index for index, line in enumerate(lines) if line.lstrip().startswith("model:")]
        if len(at) != 1:
            raise BoardError(f"cannot name the model in {self._yaml}: {len(at)} lines say `model:`")
        indent = lines[at[0]][: len(lines[at[0]]) - len(lines[at[0]].lstrip())]
        lines[at[0]] = f'{indent}model: "{folder}"\n'
        self._yaml.write_text("".join(lines), encoding="utf-8")

    def deploy(self, board: Board, *options: str, check: bool = True) -> Ran:
        """`avocadoctl -H root@board -o json deploy`."""
        line = ["-H", BOARD, "-o", "json", "deploy", "-C", str(self.folder), *options]
        return self.avocadoctl(*line, board=board, check=check, timeout_s=DEPLOY_TIMEOUT_S)

    def status(self, board: Board) -> dict[str, Any]:
        """`avocadoctl -H root@board -o json status`."""
        return self.avocadoctl("-H", BOARD, "-o", "json", "status", board=board).document

    def environment(self, board: Board | None = None) -> dict[str, str]:
        """What a command runs with; with a board, that board's ssh is the first on PATH."""
        # Images carry bytecode of the board's own Python, made by the interpreter of its root file system.
        environment = {**os.environ, "AVOCADO_BOARD_PYTHON": str(rootfs.board_python())}
        if board is not None:
            environment["PATH"] = f"{board.access.programs}:{environment['PATH']}"
        return environment

    def avocadoctl(self, *arguments: str, board: Board | None = None, check: bool = True, timeout_s: float = 60) -> Ran:
        """Run the installed command; with a board, that board's ssh is the first on PATH."""
        program = Path(sys.executable).with_name("avocadoctl")
        done = subprocess.run(
            [str(program), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=self.environment(board),
            cwd=TREE,
            check=False,
        )
        if check and done.returncode != 0:
            said = done.stderr.strip() or done.stdout.strip()
            raise BoardError(f"cannot run `avocadoctl {' '.join(arguments)}`: status {done.returncode}: {said}")
        return Ran(done.returncode, done.stdout, done.stderr)


def wait_until_serving(board: Board, timeout_s: float = 60) -> None:
    """The agent is up and the pose service answers on the NPU."""

    def serves() -> bool:
        said = board.exec(["avocadoctl", "-o", "json", "status"], check=False)
        if said.returncode != 0:
            return False
        inference = json.loads(said.stdout).get("inference") or {}
        return bool(inference.get("backend") == "npu" and inference.get("frames", 0) > 0)

    if not holds_within(serves, timeout_s):
        units = ["avocadod.service", "pose.service", "systemd-sysext.service"]
        state = board.exec(["systemctl", "--no-pager", "--lines=15", "status", *units], check=False).stdout
        said = board.exec(["avocadoctl", "status"], check=False)
        raise BoardError(
            f"board {board.name} did not serve on the NPU within {timeout_s:g} s\n{state}\n{said.stdout}{said.stderr}"
        )


def void(_: object) -> None:
    """For a callback that must not return anything."""

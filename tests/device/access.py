"""Reaching the board as a user reaches a real one: with ssh and a key, from another machine.

The other machine is the workstation's network namespace, so `bin/ssh` in the board's folder enters that and then runs
the host's own ssh with this board's configuration. With that folder first on PATH, whatever runs `ssh root@board`
reaches the board unchanged.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.device.network import Network
from tests.device.process import run

USERS = {"root": ("root", 0), "oper": ("home/oper", 1000)}


@dataclass(frozen=True, slots=True)
class Access:
    """The keys, the ssh configuration and the ssh program of one board, in `folder`."""

    folder: Path
    network: Network

    @property
    def programs(self) -> Path:
        """The folder to put on PATH."""
        return self.folder / "bin"

    @property
    def config(self) -> Path:
        """The ssh configuration: it knows the host `board`."""
        return self.folder / "ssh_config"

    def create(self, root: Path) -> None:
        """Make the keys, put them into the board's root file system, and write what the host's ssh needs."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.programs.mkdir(parents=True)
        user_key, host_key = self.folder / "id_ed25519", root / "etc/ssh/ssh_host_ed25519_key"
        for path, comment in ((user_key, "workstation"), (host_key, "board")):
            key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
            run(key, doing="make an ssh key")
        for home, owner in USERS.values():
            _authorize(root / home, user_key.with_suffix(".pub"), owner)
        host_public = host_key.with_suffix(".pub").read_text()
        (self.folder / "known_hosts").write_text(f"board {host_public}")
        self.config.write_text(self._config_text())
        program = self.programs / "ssh"
        within = shlex.join(["ip", "netns", "exec", self.network.workstation_namespace])
        ssh = shlex.join([shutil.which("ssh") or "/usr/bin/ssh", "-F", str(self.config)])
        program.write_text(f'#!/bin/sh\nexec {within} {ssh} "$@"\n')
        program.chmod(0o755)

    def command(self, user: str = "root") -> list[str]:
        """The start of a command line that ends with what is to run on the board."""
        return [str(self.programs / "ssh"), f"{user}@board"]

    def ssh(
        self, argv: Sequence[str] | str, *, user: str, input_text: str | None, timeout_s: float, check: bool
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the board. A string is handed to the board's shell as it is."""
        command = argv if isinstance(argv, str) else shlex.join(argv)
        doing = f"run `{command}` on the board"
        line = [*self.command(user), command]
        return run(line, doing=doing, timeout_s=timeout_s, input_text=input_text, check=check)

    def copy(self, source: Path, destination: str, *, user: str, timeout_s: float) -> None:
        """Copy a file or a folder to the board."""
        scp = ["scp", "-q", "-r", "-S", str(self.programs / "ssh"), str(source), f"{user}@board:{destination}"]
        run(scp, doing=f"copy {source} to the board", timeout_s=timeout_s)

    def _config_text(self) -> str:
        return f"""Host board
    HostName {self.network.board_address}
    HostKeyAlias board
    User root
    IdentityFile "{self.folder / "id_ed25519"}"
    IdentitiesOnly yes
    UserKnownHostsFile "{self.folder / "known_hosts"}"
    StrictHostKeyChecking yes
    BatchMode yes
    ConnectTimeout 5
    LogLevel ERROR
"""


def _authorize(home: Path, public_key: Path, owner: int) -> None:
    folder = home / ".ssh"
    folder.mkdir(mode=0o700, exist_ok=True)
    keys = folder / "authorized_keys"
    keys.write_text(public_key.read_text())
    keys.chmod(0o600)
    for path in (folder, keys):
        shutil.chown(path, owner, owner)

"""The board's network: a namespace for the board, one for the workstation that speaks to it, and a cable between them.

Both ends live in namespaces of their own, so nothing of the host's network changes and two boards never meet.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.device.process import BoardError, holds_within, run

NAMESPACES = Path("/run/netns")


@dataclass(frozen=True, slots=True)
class Network:
    """Two namespaces and a veth pair. Everything in it is derived from the number of the board's slot."""

    slot: int

    @property
    def board_namespace(self) -> str:
        """Where the board runs."""
        return f"avb{self.slot}"

    @property
    def workstation_namespace(self) -> str:
        """Where the programs run that speak to the board."""
        return f"avb{self.slot}ws"

    @property
    def workstation_address(self) -> str:
        """The first host address of this slot's /30 in 198.18.0.0/15, the range kept for tests (RFC 2544)."""
        return f"198.18.{self.slot // 64}.{self.slot % 64 * 4 + 1}"

    @property
    def board_address(self) -> str:
        """The second host address of this slot's /30."""
        return f"198.18.{self.slot // 64}.{self.slot % 64 * 4 + 2}"

    def up(self) -> None:
        """Make both namespaces and the cable; fine when they are there."""
        ends = (
            (self.board_namespace, f"avb{self.slot}d", self.board_address),
            (self.workstation_namespace, f"avb{self.slot}w", self.workstation_address),
        )
        if all(_is_mounted(namespace) for namespace, _, _ in ends):
            return
        self.down()
        for namespace, _, _ in ends:
            self._ip("netns", "add", namespace)
        (board, board_end, _), (workstation, workstation_end, _) = ends
        cable = ["type", "veth", "peer", "name", workstation_end, "netns", workstation]
        self._ip("link", "add", board_end, "netns", board, *cable)
        for namespace, end, address in ends:
            self._ip("-n", namespace, "addr", "add", f"{address}/30", "dev", end)
            self._ip("-n", namespace, "link", "set", end, "up")
            self._ip("-n", namespace, "link", "set", "lo", "up")

    def down(self) -> None:
        """End what still runs in the namespaces and remove them; fine when they are gone."""
        for namespace in (self.workstation_namespace, self.board_namespace):
            if (NAMESPACES / namespace).exists():
                if not holds_within(partial(self._ended_processes, namespace), timeout_s=10):
                    raise BoardError(f"cannot remove the network namespace {namespace}: its processes do not end")
                self._ip("netns", "delete", namespace)

    def traces(self) -> list[str]:
        """What of this network is still there."""
        names = (self.board_namespace, self.workstation_namespace)
        return [f"network namespace {name}" for name in names if (NAMESPACES / name).exists()]

    def _ended_processes(self, namespace: str) -> bool:
        found = run(["ip", "netns", "pids", namespace], doing=f"list the processes in {namespace}", check=False)
        for pid in found.stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        return not found.stdout.split()

    def _ip(self, *arguments: str) -> None:
        run(["ip", *arguments], doing=f"set up the network of board slot {self.slot}")


def _is_mounted(namespace: str) -> bool:
    """A name without a namespace behind it is what a reboot leaves where /run is not a tmpfs."""
    path = NAMESPACES / namespace
    return path.exists() and path.stat().st_dev != NAMESPACES.stat().st_dev

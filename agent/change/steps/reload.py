"""reload: systemd and the bus have read the new files, and what the new extensions ask of a merge has run."""

from __future__ import annotations

from dataclasses import dataclass

from agent.change.step import Inputs, Memo, Report
from agent.change.steps.releases import Releases
from agent.extensions import commands, modules
from agent.ports.protocols import Units

RELOAD_TIMEOUT_S = 30.0
COMMAND_TIMEOUT_S = 30.0
MODPROBE = "/usr/sbin/modprobe"


@dataclass(frozen=True, slots=True)
class Reload:
    """Inputs: `images` that came, and those `leaving`."""

    units: Units
    releases: Releases

    kind = "reload"
    commits = False
    volatile = True
    cancellable = False

    def prepare(self, inputs: Inputs) -> Memo:
        """What the images that came ask for."""
        coming = self.releases.keys(inputs["images"])
        return {
            # A daemon-reload costs a quarter of a second of the service's absence; a model has no units.
            "manager": self.releases.reload_manager(inputs["images"], inputs.get("leaving", ())),
            "modules": [name for keys in coming for name in modules(keys)],
            "on_merge": [argv for keys in coming for argv in commands(keys, "AVOCADO_ON_MERGE")],
        }

    def do(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """Units, bus policy, modules and commands are those of the new set."""
        if memo.get("manager", True):
            self.units.reload_manager(RELOAD_TIMEOUT_S)
        for name in memo["modules"]:
            self.units.run([MODPROBE, "--", name], COMMAND_TIMEOUT_S)
        for argv in memo["on_merge"]:
            self.units.run(argv, COMMAND_TIMEOUT_S)

    def undo(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """Nothing yet: steps are undone in reverse, so the old files are not back. stop_services reads them again."""

"""stop_services: what runs from the images that leave, or must see those that come, is stopped. Never the agent.

Bystanders are stopped and started as well as it goes: nobody promised how they take it, so their failure is a warning.
Then the leaving extensions' AVOCADO_ON_UNMERGE runs, while their files are still there. Steps are undone in reverse, so
undo here runs when the old overlay is back: it reads the old units again, does the old merge's half, and starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from agent.change.step import Inputs, Memo, Report
from agent.change.steps.absence import Absence
from agent.change.steps.releases import AffectedUnits, Releases
from agent.change.steps.reload import MODPROBE, RELOAD_TIMEOUT_S
from agent.contract.errors import OperationError
from agent.extensions import commands, modules
from agent.ports.protocols import Units, UnitState

STOP_TIMEOUT_S = 20.0
START_TIMEOUT_S = 120.0
COMMAND_TIMEOUT_S = 30.0
_RUNNING = ("active", "activating", "reloading", "refreshing")


@dataclass(frozen=True, slots=True)
class StopServices:
    """Inputs: `units` that the images that leave concern, the `bystanders` among them, `images` that come, `leaving`.

    `unread` processes and `jobs` are left alone. `after_stuck`: what stands still was not stopped by anybody.
    """

    units: Units
    affected: AffectedUnits
    releases: Releases
    absence: Absence

    kind = "stop_services"
    commits = False
    volatile = True
    cancellable = True

    def prepare(self, inputs: Inputs) -> Memo:
        """Which units there are to stop, and which of them run. Raises `no-space`."""
        names = self.affected.to_stop(inputs)
        states = self.units.states(names)
        leaving = self.releases.leaving(inputs["leaving"])
        manager = self.releases.reload_manager(inputs["images"], inputs["leaving"])
        if manager:
            self.units.require_reload()
        return {
            "manager": manager,
            "units": names,
            # Nobody could start a masked one again.
            "running": [n for n in names if states[n].active in _RUNNING and states[n].load != "masked"],
            "stopped": [
                n for n in inputs["units"] if n in names and not inputs.get("after_stuck") and _rests(states[n])
            ],
            "on_unmerge": [argv for keys in leaving for argv in commands(keys, "AVOCADO_ON_UNMERGE")],
            "modules": [name for keys in leaving for name in modules(keys)],
            "on_merge": [argv for keys in leaving for argv in commands(keys, "AVOCADO_ON_MERGE")],
        }

    def do(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """They are stopped."""
        self.affected.leave_stopped(memo["stopped"])
        for process in inputs.get("unread", ()):
            report.warn(f"nobody can tell in time whether {process} runs from an image that leaves; it is left alone")
        for job in inputs.get("jobs", ()):
            report.warn(f"{job} runs from an image that leaves; it is a job that ends by itself, and is left alone")
        self.absence.begins()
        for name in reversed(memo["units"]):
            try:
                self.units.stop(name, STOP_TIMEOUT_S)
            except OperationError as error:
                if name not in inputs.get("bystanders", ()):
                    raise
                report.warn(error.message)
        for argv in memo["on_unmerge"]:
            self.units.run(argv, COMMAND_TIMEOUT_S)

    def undo(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """Those that ran run again. Every part is tried; the first failure is told."""
        works: list[Callable[[], None]] = []
        if memo.get("manager", True):
            works.append(partial(self.units.reload_manager, RELOAD_TIMEOUT_S))
        works += [partial(self.units.run, [MODPROBE, "--", name], COMMAND_TIMEOUT_S) for name in memo["modules"]]
        works += [partial(self.units.run, argv, COMMAND_TIMEOUT_S) for argv in memo["on_merge"]]
        starts = {name: partial(self._start_again, name, report) for name in memo["running"]}
        all_of([*works, *sparing(inputs, starts, report)])

    def _start_again(self, name: str, report: Report) -> None:
        if self.units.states([name])[name].load == "masked":  # since it was stopped here: nobody could start it
            report.warn(f"{name} was masked meanwhile, and stays stopped")
            return
        self.units.start(name, START_TIMEOUT_S)


def sparing(inputs: Inputs, works: Mapping[str, Callable[[], None]], report: Report) -> list[Callable[[], None]]:
    """For an undo, what is to be done with each unit: with a bystander, a failure is a warning."""
    others = inputs.get("bystanders", ())
    return [partial(_warned, work, report) if name in others else work for name, work in works.items()]


def _warned(work: Callable[[], None], report: Report) -> None:
    try:
        work()
    except OperationError as error:
        report.warn(error.message)


def _rests(unit: UnitState) -> bool:
    """Somebody stopped it, or forbade it. A failed or restarting unit is one that somebody wants."""
    return unit.load == "masked" or (unit.load == "loaded" and unit.active == "inactive")


def all_of(works: Sequence[Callable[[], None]]) -> None:
    """Do all of them, and raise the first failure when they are done: one that fails must not keep the others back."""
    failures: list[OperationError] = []
    for work in works:
        try:
            work()
        except OperationError as error:
            failures.append(error)
    if failures:
        raise failures[0]

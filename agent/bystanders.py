"""Who must stop with an image although no extension owns it: what runs from its files, and what goes down with others.

A library of an extension may be used by any service of the board. One that kept it mapped would go on with the old
bytes, and the next change would find it in the way. Reads only; the list goes into the plan.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from agent.contract.errors import OperationError
from agent.contract.manifest import Extension
from agent.plan import AGENT_UNIT, BUS_UNITS, Bystanders
from agent.ports.protocols import ImageReader, MappedFiles, Mappings, Store, Units, UnitState

RUNNING = ("active", "activating", "reloading", "refreshing")
_ROOTS = ("/usr", "/opt", "/etc")
_LOG = logging.getLogger("avocado.bystanders")


class Finder(Protocol):
    """Finds them."""

    def find(self, leaving: Sequence[Extension], owned: Iterable[str]) -> Bystanders:
        """For images that leave and the units that their extensions own."""


class BystanderFinder:
    """Finds them on this board."""

    def __init__(self, mappings: Mappings, images: ImageReader, store: Store, units: Units) -> None:
        self._mappings = mappings
        self._images = images
        self._store = store
        self._units = units

    def find(self, leaving: Sequence[Extension], owned: Iterable[str]) -> Bystanders:
        """For images that leave and the units that their extensions own."""
        if not leaving:
            return Bystanders()
        owned = list(owned)
        files = self._mappings.by_service()
        mapping = [unit for unit in self._mapping(leaving, files) if unit not in owned]
        states = self._units.states(mapping)
        mapping = self._ended_by_a_stop(mapping, states, leaving, files)
        jobs = tuple(unit for unit in mapping if states[unit].is_job)
        units = self._with_dependents([*owned, *(unit for unit in mapping if unit not in jobs)])
        return Bystanders(
            tuple(unit for unit in units if unit not in owned),
            jobs,
            tuple(f"{process} of {process.unit}" for process in files.unread if process.unit not in units),
        )

    def _ended_by_a_stop(
        self, mapping: Sequence[str], states: Mapping[str, UnitState], leaving: Sequence[Extension], files: MappedFiles
    ) -> list[str]:
        """Without those of which only processes that live on map a file: sessions of an sshd, where no logind runs.

        A deploy is such a session itself, and runs from the agent's own image.
        """
        none: frozenset[str] = frozenset()
        sparing = {u: files.by_process.get(states[u].main_pid, none) for u in mapping if states[u].spares_others}
        themselves = self._mapping(leaving, MappedFiles(sparing))
        return [unit for unit in mapping if unit not in sparing or unit in themselves]

    def _mapping(self, leaving: Sequence[Extension], files: MappedFiles) -> list[str]:
        users: dict[str, set[str]] = {}
        for unit, paths in files.by_service.items():
            for path in paths:
                # A file of an overlay that was replaced meanwhile is shown without the folder it was merged over.
                for place in (path, *(f"{root}{path}" for root in _ROOTS)):
                    users.setdefault(place, set()).add(unit)
        places = sorted(place for place in users if place.startswith(tuple(f"{root}/" for root in _ROOTS)))
        found = {unit for extension in leaving for place in self._carried(extension, places) for unit in users[place]}
        return sorted(found - {AGENT_UNIT, *BUS_UNITS})

    def _carried(self, extension: Extension, places: Sequence[str]) -> Iterable[str]:
        image = self._store.image(extension.image_id)
        if image is None:
            return ()
        try:
            return self._images.carried(image, places)
        except OperationError as error:
            # The image that goes is damaged on the disk. That is no reason to keep it.
            _LOG.warning("%s", error.message)
            return ()

    def _with_dependents(self, names: Sequence[str]) -> list[str]:
        """The units, and whatever of what runs systemd would stop with them."""
        found = dict.fromkeys(names)
        new = list(found)
        while new:
            related = self._units.relations(new)
            stopped = sorted({unit for relations in related.values() for unit in relations.stops} - set(found))
            states = self._units.states(stopped)
            comes_back = (unit for unit in stopped if states[unit].active in RUNNING and not states[unit].is_job)
            new = [unit for unit in comes_back if unit not in (AGENT_UNIT, *BUS_UNITS)]
            found.update(dict.fromkeys(new))
        return list(found)

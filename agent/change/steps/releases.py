"""What the images of a change say about themselves: the units they own, the modules and commands they ask for.

Images are named by content, so a release file is read once; the one reading happens before anything is stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Extension
from agent.extensions import Kind, owned_services
from agent.order import in_start_order
from agent.plan import AGENT_UNIT, INFERENCE_UNIT
from agent.ports.protocols import ImageReader, Store, Units

_LOG = logging.getLogger("avocado.change")
_NO = ("0", "no", "n", "false", "f", "off")  # parse_boolean() of systemd

Image = Mapping[str, Any]  # an extension of the manifest, as the plan put it into a step's inputs


class Releases:
    """Release files of images in the store."""

    def __init__(self, store: Store, reader: ImageReader) -> None:
        self._store = store
        self._reader = reader
        self._read: dict[tuple[str, str], Mapping[str, str]] = {}

    def of(self, image: Image) -> list[tuple[Kind, Mapping[str, str]]]:
        """The release keys of one image, per kind it is meant for. Raises `bad-image` or `not-found`."""
        return [(Kind(kind), self._keys(image, Kind(kind))) for kind in image["types"]]

    def keys(self, images: Sequence[Image]) -> list[Mapping[str, str]]:
        """The release keys of several images, one after the other."""
        return [keys for image in images for _, keys in self.of(image)]

    def leaving(self, images: Sequence[Image]) -> list[Mapping[str, str]]:
        """The same of images that go. One that is lost or damaged says nothing: that must not keep it on the board."""
        found: list[Mapping[str, str]] = []
        for image in images:
            try:
                found += self.keys([image])
            except OperationError as error:
                _LOG.warning("%s", error.message)
                found.append({})
        return found

    def reload_manager(self, images: Sequence[Image], leaving: Sequence[Image]) -> bool:
        """Whether systemd and the bus have to read their files again. An image that says nothing may bring units."""
        keys = [*self.keys(images), *self.leaving(leaving)]
        return any(said.get("EXTENSION_RELOAD_MANAGER", "1") not in _NO for said in keys)

    def _keys(self, image: Image, kind: Kind) -> Mapping[str, str]:
        image_id = image["image_id"]
        if (image_id, kind) not in self._read:
            path = self._store.image(image_id)
            if path is None:
                raise OperationError(
                    ErrorCode.NOT_FOUND,
                    f"cannot read extension {image['name']}: its image {image_id} is not on the board",
                    "Deploy the runtime again from the host.",
                )
            self._read[image_id, kind] = self._reader.release(path, image["name"], kind)
        return self._read[image_id, kind]


class AffectedUnits:
    """The units a change stops and starts, worked out when the new images are on the board.

    A plan knows the units of the images that leave; those of the images that come stand inside them.
    """

    def __init__(self, units: Units, releases: Releases) -> None:
        self._units = units
        self._releases = releases
        self._stay_stopped: Sequence[str] = ()

    def leave_stopped(self, units: Sequence[str]) -> None:
        """Somebody had stopped these. Kept in memory: a change that another start finds before its commit reverts."""
        self._stay_stopped = units

    def to_stop(self, inputs: Mapping[str, Any]) -> list[str]:
        """Owned by an image that leaves or by one that comes, whoever shipped the unit file, in start order."""
        return self._ordered(unit for unit in (*inputs["units"], *self._coming(inputs)) if unit != AGENT_UNIT)

    def to_start(self, inputs: Mapping[str, Any]) -> list[str]:
        """Those of the images that come, and those that were stopped and still exist; never what somebody stopped."""
        coming = self._coming(inputs)
        states = self._units.states(list(dict.fromkeys((*inputs["units"], *coming))))
        remaining = [unit for unit in inputs["units"] if states[unit].load == "loaded"]
        wanted = [
            unit
            for unit in dict.fromkeys((*remaining, *coming))
            if states[unit].load != "masked" and not (states[unit].load == "not-found" and inputs.get("partial"))
        ]
        return self._ordered(unit for unit in wanted if unit != AGENT_UNIT and unit not in self._stay_stopped)

    def _ordered(self, units: Iterable[str]) -> list[str]:
        # One is started when the one before it is up; so the pose service stops last and starts first.
        names = list(dict.fromkeys(units))
        return in_start_order(names, self._units.relations(names), first=INFERENCE_UNIT)

    def _coming(self, inputs: Mapping[str, Any]) -> list[str]:
        return [unit for keys in self._releases.keys(inputs["images"]) for unit in owned_services(keys)]


def extensions_of(images: Sequence[Image]) -> list[Extension]:
    """The manifest's entries again."""
    return [Extension.model_validate(image) for image in images]

"""Merged images whose bytes are no longer those that were signed: found once per boot, said until it is no longer so.

Reading an image whole takes its time, so one is read again only after its file became another: what is fetched is a new
file, hashed before it is given its name. An image that is not merged any more is nobody's problem until it is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent.contract.manifest import Extension
from agent.extensions import Kind, MergedSet, Problem
from agent.ports.protocols import Store

_Stamp = tuple[int, int] | None


class DamagedImages:
    """What was found, and what is still so."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.extensions: list[Extension] = []
        self._stamps: dict[str, _Stamp] = {}

    def look(self, extensions: Iterable[Extension]) -> None:
        """Read these images whole, and remember which are damaged."""
        self.extensions = [extension for extension in extensions if not self._is_sound(extension)]

    def problems(self, merged: MergedSet) -> list[Problem]:
        """A problem for each that is merged still, and was not fetched anew."""
        self.extensions = [extension for extension in self.extensions if not self._fetched(extension)]
        return [
            Problem(
                "image-damaged",
                f"extension {extension.name} {extension.version}: its image no longer has the bytes that were signed",
                "Deploy this runtime again from the host, then reboot; if it happens again, replace the disk.",
            )
            for extension in self.extensions
            if _is_merged(extension, merged)
        ]

    def _fetched(self, extension: Extension) -> bool:
        known = extension.image_id in self._stamps
        if known and self._stamps[extension.image_id] == self._stamp(extension) is not None:
            return False
        return self._is_sound(extension)

    def _is_sound(self, extension: Extension) -> bool:
        self._stamps[extension.image_id] = self._stamp(extension)
        if extension.sha256:
            return self._store.verify_image(extension)
        return self._store.verify_made(extension.image_id)  # only its link is known; the name has to do

    def _stamp(self, extension: Extension) -> _Stamp:
        path = self._store.image(extension.image_id)
        try:
            found = path.lstat() if path is not None else None
        except OSError:
            return None
        return (found.st_ino, found.st_mtime_ns) if found is not None else None


def _is_merged(extension: Extension, merged: MergedSet) -> bool:
    for kind in map(Kind, extension.types):
        if kind in merged.images:
            if extension.image_id in merged.images[kind].values():
                return True
        elif any(link.partition("-")[2] == extension.name for link in merged.names.get(kind, ())):
            return True
    return False

"""Merged images whose bytes are no longer those that were signed: found once per boot, said until it is no longer so.

Reading an image whole takes its time, so one is read again only after its file became another: what is fetched is a new
file, hashed before it is given its name. What is merged stays the damaged file whatever then has its name, so that is
said until the image is not merged any more. Then it is nobody's problem until it is wanted.
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
        self._read: dict[str, tuple[_Stamp, bool]] = {}

    def look(self, extensions: Iterable[Extension]) -> None:
        """Read these images whole, and remember which are damaged."""
        self.extensions = [extension for extension in extensions if not self._is_sound(extension)]

    def problems(self, merged: MergedSet) -> list[Problem]:
        """A problem for each that is merged still; one that is sound and not merged is forgotten."""
        found = [(extension, _is_merged(extension, merged), self._is_sound(extension)) for extension in self.extensions]
        self.extensions = [extension for extension, is_merged, is_sound in found if is_merged or not is_sound]
        return [_problem(extension, is_sound) for extension, is_merged, is_sound in found if is_merged]

    def _is_sound(self, extension: Extension) -> bool:
        stamp = self._stamp(extension)
        known, was_sound = self._read.get(extension.image_id, (None, False))
        if known is not None and known == stamp:
            return was_sound
        if extension.sha256:
            is_sound = self._store.verify_image(extension)
        else:  # only its link is known; the name has to do
            is_sound = self._store.verify_made(extension.image_id)
        self._read[extension.image_id] = (stamp, is_sound)
        return is_sound

    def _stamp(self, extension: Extension) -> _Stamp:
        path = self._store.image(extension.image_id)
        try:
            found = path.lstat() if path is not None else None
        except OSError:
            return None
        return (found.st_ino, found.st_mtime_ns) if found is not None else None


def _problem(extension: Extension, is_sound: bool) -> Problem:
    name = f"extension {extension.name} {extension.version}"
    if is_sound:
        return Problem(
            "image-damaged",
            f"{name}: its image is mended on the disk; what runs was merged from the damaged one",
            "Reboot when it suits; if it happens again, replace the disk.",
        )
    return Problem(
        "image-damaged",
        f"{name}: its image no longer has the bytes that were signed",
        "Deploy this runtime again from the host, then reboot; if it happens again, replace the disk.",
    )


def _is_merged(extension: Extension, merged: MergedSet) -> bool:
    for kind in map(Kind, extension.types):
        if kind in merged.images:
            if extension.image_id in merged.images[kind].values():
                return True
        elif any(link.partition("-")[2] == extension.name for link in merged.names.get(kind, ())):
            return True
    return False

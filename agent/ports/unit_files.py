"""The files that make a unit: what each says, so that those systemd has read can be told from those it would read.

Known by their names, as systemd does it: of two drop-ins with one name it reads the one in the folder that comes first.
Standard library only: a child in a namespace of its own asks too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

_FRAGMENT = ""
_MAX_BYTES = 1 << 20
# systemd.unit(5), "System Unit Search Path"
_LOOKED_IN = (
    "/etc/systemd/system.control",
    "/run/systemd/system.control",
    "/run/systemd/transient",
    "/run/systemd/generator.early",
    "/etc/systemd/system",
    "/etc/systemd/system.attached",
    "/run/systemd/system",
    "/run/systemd/system.attached",
    "/run/systemd/generator",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
    "/run/systemd/generator.late",
)


def contents(fragment: str, drop_ins: Iterable[str]) -> dict[str, str]:
    """The digest of the fragment and of each drop-in by its name; an empty or a missing file says nothing."""
    named = {_FRAGMENT: fragment, **{os.path.basename(path): path for path in drop_ins}}  # noqa: PTH119
    found = {name: _digest(path) for name, path in named.items()}
    return {name: digest for name, digest in found.items() if digest}


def to_be_read(unit: str, root: str = "") -> dict[str, str]:
    """The same of the files that a daemon-reload would take for a unit, as the folders are here."""
    folders = [root + folder for folder in _LOOKED_IN]
    fragment = next((f"{folder}/{unit}" for folder in folders if os.path.lexists(f"{folder}/{unit}")), "")
    drop_ins: dict[str, str] = {}
    for of in (unit, unit.rpartition(".")[2]):
        for folder in folders:
            for name in _names(f"{folder}/{of}.d"):
                drop_ins.setdefault(name, f"{folder}/{of}.d/{name}")
    return contents(fragment, drop_ins.values())


def _names(folder: str) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(".conf"))  # noqa: PTH208
    except OSError:
        return []


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            data = file.read(_MAX_BYTES)
    except OSError:
        return ""
    return hashlib.sha256(data).hexdigest() if data else ""

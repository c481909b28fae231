"""Graphs that an NPU's library compiled, kept between starts in a folder of their own per driver and model.

A compile takes minutes on some NPUs, and a graph compiled by another driver or for another model must never be loaded.
So the folder's name is a digest of the library's bytes, the versions of its kernel modules, the kernel, the runtime and
the model file. `{cache}` in a profile's `env` and `delegate.options` stands for the folder. A folder whose compile was
cut short may hold half a graph and is emptied; one that was whole is emptied when it failed twice in a row.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

PLACEHOLDER = "{cache}"
_MARK = ".unproven"
# The model in use, the one before it that a rollback brings back, and one more.
_KEPT = 3


class CompiledGraphs:
    """One driver's and one model's folder. `cold`: it is empty, so the first inference compiles."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = folder / _MARK
        tries = self._mark.read_text() if self._mark.exists() else ""
        if tries.startswith("cold") or len(tries) > 1:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.cold = not any(entry.name != _MARK for entry in folder.iterdir())
        self._mark.write_text("cold" if self.cold else tries[:1] + "x")

    def prove(self) -> None:
        """The first inference came back right: what lies here can be used again."""
        self._mark.unlink(missing_ok=True)

    def fill_in(self, words: Mapping[str, str]) -> dict[str, str]:
        """The values with this folder in place of `{cache}`."""
        return {key: value.replace(PLACEHOLDER, str(self.folder)) for key, value in words.items()}


def compiled_graphs(root: Path, name: str, identity: Iterable[str]) -> CompiledGraphs:
    """The folder `root`/`name`-DIGEST; older ones of that accelerator go. OSError where nothing can be kept."""
    digest = hashlib.sha256("\0".join(identity).encode()).hexdigest()[:16]
    graphs = CompiledGraphs(root / f"{name}-{digest}")
    os.utime(graphs.folder)
    others = sorted(root.glob(f"{name}-*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in others[_KEPT:]:
        shutil.rmtree(folder)
    return graphs


def driver_identity(library: str, modules: Iterable[str], sysfs: Path = Path("/sys")) -> list[str]:
    """What tells one state of a driver from another."""
    known = [library, os.uname().release]
    path = Path(library)
    # A bare name is the loader's to find, and a missing library the loader's to complain about.
    if path.is_file():
        with path.open("rb") as file:
            known.append(hashlib.file_digest(file, "sha256").hexdigest())
    for module in modules:
        for attribute in ("version", "srcversion"):
            told = sysfs / "module" / module / attribute
            known.append(f"{module} {attribute} {told.read_text().strip() if told.exists() else ''}")
    return known


def wanted(*words: Mapping[str, str]) -> bool:
    """Whether a profile mentions the folder at all."""
    return any(PLACEHOLDER in value for table in words for value in table.values())

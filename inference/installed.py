"""Which versions this board has of what a model file must match, found where its accelerator profile says.

A library tells its version by an exported function without arguments that returns text; a kernel module tells it in
sysfs; anything else is a line in a file or stands in the profile itself. What cannot be found is left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

_LIMIT = 120


def installed_versions(
    sources: Mapping[str, Mapping[str, str]], library: str, sysfs: Path = Path("/sys")
) -> dict[str, str]:
    """By what it is of; each source has one of the keys `text`, `file`, `module`, `symbol`. May load the library."""
    found = {what: _version(source, library, sysfs) for what, source in sources.items()}
    return {what: version for what, version in found.items() if version}


def main(arguments: Sequence[str]) -> None:
    """For a process of its own, which a vendor's library may hang or crash: prints the versions as JSON."""
    sources, library = arguments
    print(json.dumps(installed_versions(json.loads(sources), library)))


def _version(source: Mapping[str, str], library: str, sysfs: Path) -> str:
    text = source.get("text", "")
    # A missing file, library or function is for the loader to complain about.
    with contextlib.suppress(OSError, AttributeError):
        if symbol := source.get("symbol"):
            text = _told_by(library, symbol)
        elif module := source.get("module"):
            text = (sysfs / "module" / module / "version").read_text(errors="replace")
        elif file := source.get("file"):
            with Path(file).open(errors="replace") as lines:
                text = lines.readline(_LIMIT)
    return "".join(character for character in text if " " <= character <= "~")[:_LIMIT].strip()


def _told_by(library: str, symbol: str) -> str:
    function = getattr(ctypes.CDLL(library), symbol)
    function.restype = ctypes.c_char_p
    told = function()
    return told.decode(errors="replace") if isinstance(told, bytes) else ""

"""What a base must supply before an extension can run on it, checked in its root file system.

Everything here would otherwise be found out on the board, by a unit that fails or a merge that silently leaves an image
out.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from agent.host.elf import elf_machine
from agent.host.root_fs import RootFs
from agent.host.target import Target

_SYSTEMD_PROGRAMS = ("/usr/bin/systemd-sysext", "/usr/bin/systemd-confext")


def missing(base: RootFs, target: Target, packages: Iterable[str]) -> list[str]:
    """One line for each thing the base lacks; empty when an extension of the target will run on it."""
    return [*_system(base, target), *_python(base, target), *_names(base), *_packages(base, packages)]


def _system(base: RootFs, target: Target) -> Iterator[str]:
    found = os_release(base)
    for key, wanted in (("ID", target.os_id), ("VERSION_ID", target.os_version_id)):
        if found.get(key) != wanted:
            yield f"os-release says {key}={found.get(key, '')!r}, target {target.board} is for {wanted!r}"
    for program in _SYSTEMD_PROGRAMS:
        path = base.path(program)
        if not base.exists(program):
            yield f"{program} is missing: systemd 255 or newer, with extensions, is needed"
        elif path.is_file() and elf_machine(path) not in (None, target.arch):
            yield f"{program} is for {elf_machine(path)}, target {target.board} is {target.arch}"
    if not any(base.exists(f"/usr/bin/{daemon}") for daemon in ("dbus-daemon", "dbus-broker")):
        yield "neither dbus-daemon nor dbus-broker is installed"


def _python(base: RootFs, target: Target) -> Iterator[str]:
    if not base.exists("/usr/bin/python3"):
        yield "/usr/bin/python3 is missing"
    elif not base.exists(f"/usr/bin/python{target.python}"):
        yield f"its Python is not {target.python}, which the images of target {target.board} are built for"


def _names(base: RootFs) -> Iterator[str]:
    """Users and groups of extensions come from /usr/lib/userdb, which only libnss-systemd looks up."""
    lines = dict(line.split(":", 1) for line in base.read("/etc/nsswitch.conf").splitlines() if ":" in line)
    for database in ("passwd", "group"):
        if "systemd" not in lines.get(database, "").split():
            yield f"nsswitch.conf does not look up {database} in systemd (package libnss-systemd)"


def _packages(base: RootFs, packages: Iterable[str]) -> Iterator[str]:
    installed = _installed(base)
    if installed is None:
        return  # a base without a package database: what it must supply is checked file by file above
    for name in sorted(set(packages)):
        if name not in installed:
            yield f"package {name} is not installed"


def _installed(base: RootFs) -> set[str] | None:
    for database in ("/var/lib/dpkg/status", "/var/lib/opkg/status", "/usr/lib/opkg/status"):
        if base.exists(database):
            return _dpkg_names(base.read(database))
    return None


def _dpkg_names(status: str) -> set[str]:
    names: set[str] = set()
    for paragraph in status.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and line[0] != " ")
        if fields.get("Status", "").endswith(" installed"):
            names.add(fields.get("Package", ""))
            names.update(word.split(" (")[0].strip() for word in fields.get("Provides", "").split(","))
    return names


def os_release(base: RootFs) -> dict[str, str]:
    """The base's os-release keys."""
    text = base.read("/etc/os-release") or base.read("/usr/lib/os-release")
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key: "".join(shlex.split(value)) for key, value in pairs}

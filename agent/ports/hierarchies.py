"""Where systemd lays its overlays on this board, and what is there now.

Used in child processes that were handed its text, and by the agent for the names in it. systemd 257 decides in the same
way whether an overlay is its own (src/sysext/sysext.c).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agent.contract.release import Kind
from agent.ports import mounts

HOST = "/proc/1/ns/mnt"
MARK = "avocado"  # which images an overlay of ours is made of, beside systemd's own marks


@dataclass(frozen=True, slots=True)
class Layout:
    """How systemd lays out the overlays of one kind."""

    kind: Kind
    folder: str  # of the marks, in the root of each hierarchy
    plural: str
    hierarchies: tuple[str, ...]
    attributes: int


LAYOUTS = {
    Kind.SYSEXT: Layout(
        Kind.SYSEXT, ".systemd-sysext", "extensions", ("/usr", "/opt"), mounts.ATTR_RDONLY | mounts.ATTR_NODEV
    ),
    Kind.CONFEXT: Layout(
        Kind.CONFEXT,
        ".systemd-confext",
        "confexts",
        ("/etc",),
        mounts.ATTR_RDONLY | mounts.ATTR_NODEV | mounts.ATTR_NOSUID | mounts.ATTR_NOEXEC,
    ),
}


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One of them on this board. `old`: an overlay of systemd's kind is there now."""

    where: str
    layout: Layout
    old: bool
    backing: str  # systemd 258 and later: the block device of the base

    @property
    def marks(self) -> str:
        """The folder of systemd's marks in it."""
        return f"{self.where}/{self.layout.folder}"


def enter_host(namespace: str = HOST) -> int:
    """Live in the board's own mount namespace, and give a descriptor of it."""
    # Not the agent's own namespace: a service has one of its own, and mounts there stay there.
    host = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    mounts.enter_namespace(host)
    return host


def hierarchies_of(kinds: Iterable[Kind]) -> list[Hierarchy]:
    """Those of some kinds, as they are now."""
    found = []
    for layout in (LAYOUTS[kind] for kind in kinds):
        for where in layout.hierarchies:
            path = os.path.realpath(where)
            marks = f"{path}/{layout.folder}"
            found.append(Hierarchy(path, layout, is_ours(path, marks), _text(f"{marks}/backing")))
    return found


def is_ours(where: str, marks: str) -> bool:
    """systemd's is_our_mount_point(): the mark `dev` names the file system that is there."""
    try:
        device = os.lstat(where).st_dev
    except FileNotFoundError:
        return False
    return _text(f"{marks}/dev").strip() == f"{os.major(device)}:{os.minor(device)}"


def is_mutable(hierarchy: Hierarchy) -> bool:
    """Whether it can be written to, which no trial could take back."""
    if not hierarchy.old:
        return False
    covered = any(m.where == hierarchy.marks for m in mounts.mounted())
    return covered or Path(hierarchy.marks, "work_dir").exists()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return ""


def uncover(hierarchy: Hierarchy) -> list[tuple[str, int]]:
    """Here, not on the board, the base shows itself; returned: what is mounted below the hierarchy, as copies."""
    prefix = f"{hierarchy.where}/"
    inside: list[str] = []
    for path in sorted(m.where for m in mounts.mounted()):
        # The topmost ones: they are copied with what is below them.
        if path.startswith(prefix) and not any(path == at or path.startswith(f"{at}/") for at in inside):
            inside.append(path)
    copies = [(path, mounts.copy_of(path)) for path in inside]
    while is_ours(hierarchy.where, hierarchy.marks):
        mounts.unmount(hierarchy.where)
    if not hierarchy.old:
        for path in inside:
            mounts.unmount(path)  # the base as such, without what is mounted on it
    return copies

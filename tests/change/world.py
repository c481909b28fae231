"""The board in memory that every fake is a program over.

The world keeps apart what a power cut keeps (images, runtimes, links, journal) and what it takes (the overlay, running
services, loaded unit files). Every effect ticks the fuse before it, after it and between its parts; when the fuse
blows, nothing after that line runs. Every call is recorded, and one hook, `fail_when`, may refuse any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent.change.record import ChangeRecord
from agent.contract.errors import OperationError
from agent.contract.manifest import Manifest
from agent.extensions import Kind, owned_services

Call = tuple[Any, ...]


class Cut(BaseException):
    """The power goes, or the agent is killed."""


class Fuse:
    """Blows at the nth tick."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.count = 0

    def tick(self) -> None:
        self.count += 1
        if self.count == self.at:
            raise Cut


@dataclass
class World:
    """The whole board. `bad` says what is wrong with the model of a runtime, by runtime id."""

    # what a disk keeps
    images: set[str] = field(default_factory=set)
    begun: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)  # images whose bytes are no longer those of their names
    unreadable: set[str] = field(default_factory=set)  # runtimes whose manifest is damaged
    moved_bytes: int = 0
    runtimes: dict[str, Manifest] = field(default_factory=dict)
    indexes: dict[str, str] = field(default_factory=dict)  # runtime -> the image with its module index
    active: str | None = None
    previous: str | None = None
    synced: tuple[str | None, str | None] = (None, None)
    records: dict[int, ChangeRecord] = field(default_factory=dict)
    # what a boot keeps
    boot: int = 1
    now_s: float = 1000.0
    shown: dict[Kind, str | None] = field(default_factory=lambda: dict.fromkeys(Kind))
    scaffold: bool = False
    unit_files: str | None = None
    running: dict[str, tuple[str | None, float]] = field(default_factory=dict)
    tried: tuple[str, float, bool] | None = None  # the runtime on trial, since when, and whether on the CPU only
    # what is inside things
    releases: dict[str, dict[Kind, dict[str, str]]] = field(default_factory=dict)
    offered: Manifest | None = None
    bad: dict[str, str] = field(default_factory=dict)
    host_comes_back: bool = True
    trial_takes_s: float = 1.0
    npu_contexts: int = 1
    npu_is_busy: bool = False  # somebody else has what the service leaves of it
    of_the_base: frozenset[str] = frozenset()  # services that no image owns, and that run from files of one
    after: dict[str, frozenset[str]] = field(default_factory=dict)
    masked: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)  # owned, and their unit file is in an image that was left out
    brief: set[str] = field(default_factory=set)  # services that end by themselves as soon as they were started
    # the test's hands
    fuse: Fuse = field(default_factory=Fuse)
    calls: list[Call] = field(default_factory=list)
    fail_when: Callable[[Call, World], OperationError | None] = lambda call, world: None

    reverting: bool = False
    stopping: bool = False  # the agent was told to end

    def begin(self, *call: Any) -> None:
        """An effect is about to happen."""
        self.fuse.tick()
        self.look(*call)

    def look(self, *call: Any) -> None:
        """A call that changes nothing: recorded, and it may be refused."""
        self.calls.append(call)
        error = self.fail_when(call, self)
        if error is not None:
            raise error

    def power_cut(self, *, lose_unsynced: bool) -> None:
        """Only the disk survives; the next boot merges what `active` names and reads its unit files."""
        if lose_unsynced:
            self.active, self.previous = self.synced
        self.synced = (self.active, self.previous)
        self.boot += 1
        self.shown = dict.fromkeys(Kind, self.active)
        self.scaffold = False
        self.unit_files = self.active
        self.tried = None
        self.running = dict.fromkeys(self.of_the_base, (self.active, self.now_s))

    def boot_half(self) -> None:
        """What the agent does at its first start of a boot, once recovery is through: the owned services run."""
        for unit in self.owned(self.active):
            if unit not in self.running:
                self.running[unit] = (self.active, self.now_s)

    def owned(self, runtime_id: str | None) -> list[str]:
        """The units that a runtime's images own, but for the agent's."""
        manifest = self.runtimes.get(runtime_id or "")
        keys = [self.releases[e.image_id][Kind(k)] for e in (manifest.extensions if manifest else ()) for k in e.types]
        return [
            unit for unit in dict.fromkeys(u for k in keys for u in owned_services(k)) if unit != "avocadod.service"
        ]

    def exists(self, unit: str) -> bool:
        """systemd has read a file for it."""
        return unit not in self.missing and (unit in self.of_the_base or unit in self.owned(self.unit_files))

"""The doors of the agent: what it wants from the world, in its own words.

Every port is synchronous; the change engine runs in one thread of the daemon, and adapters that speak D-Bus hand
their calls to the daemon's event loop and wait with a deadline. Every method that waits takes its deadline in seconds
of the monotonic clock, and raises OperationError, never a foreign exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from agent.contract.linked import Links
from agent.contract.manifest import Extension, Manifest

# Values that pure modules judge are defined there and are part of these contracts.
from agent.extensions import Kind as Kind
from agent.extensions import MergedSet as MergedSet
from agent.health import InferenceState as InferenceState
from agent.health import SelfTest as SelfTest
from agent.health import UnitState as UnitState
from agent.order import Relations as Relations
from agent.tried import Tried as Tried
from agent.tried import Verdict as Verdict

Progress = Callable[[int, int], None]  # bytes or parts done, of how many


class Units(Protocol):
    """systemd's manager: units reach a state, or say why not."""

    def states(self, names: Sequence[str]) -> dict[str, UnitState]:
        """The state of each unit; a unit nobody knows has load `not-found`."""

    def relations(self, names: Sequence[str]) -> dict[str, Relations]:
        """What each unit has to do with others, as systemd has read their files; a unit nobody knows is left out."""

    def start(self, name: str, timeout_s: float) -> None:
        """The unit is active. Raises `unit-failed` or `step-timeout`."""

    def stop(self, name: str, timeout_s: float) -> None:
        """The unit is inactive or failed; a unit that does not exist counts as stopped."""

    def require_reload(self) -> None:
        """systemd would read its unit files again if it were asked now. Raises `no-space`."""

    def reload_manager(self, timeout_s: float) -> None:
        """systemd has read its unit files again (daemon-reload), and the bus its policy. Raises `no-space`."""

    def run(self, argv: Sequence[str], timeout_s: float) -> None:
        """A command has run as a transient unit of PID 1, outside the agent's sandbox, with exit status 0.

        The facts of its `unit-failed` have the `exit_status` of a command that ended by itself.
        """


class Overlay(Protocol):
    """The running overlay of /usr, /opt and /etc. It is the truth of what runs; `active` is the truth of the boot."""

    def merged(self) -> MergedSet:
        """What systemd itself says is merged."""

    def check(self, runtime: Path, timeout_s: float) -> None:
        """Every image of the runtime could be shown; what takes long about that is done now, while services run.

        Raises `bad-image` or `incompatible`.
        """

    def show(self, runtime: Path | None, timeout_s: float) -> None:
        """The running overlay is exactly this runtime folder's set (None: nothing merged); a reboot forgets it.

        Raises `switch-failed`; the overlay is then the old one, or the caller's undo shows the old one again.
        """

    def settle(self, timeout_s: float) -> None:
        """The trial's scaffolding is gone and a refresh would merge what `active` names; nothing visible changes."""


@dataclass(frozen=True, slots=True)
class Switching:
    """How this board's overlays are switched: `gapless`, or `reload` and why not the other."""

    way: str
    reason: str


@dataclass(frozen=True, slots=True)
class Process:
    """A process as somebody has to be told of it. `wchan`: where in the kernel it waits, as far as that is known."""

    pid: int
    comm: str
    state: str  # R S D Z ...
    wchan: str
    unit: str  # of the system's manager; empty without one

    def __str__(self) -> str:
        """For messages."""
        return f"pid {self.pid} ({self.comm}, state {self.state}{f' in {self.wchan}' if self.wchan else ''})"


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a device node open or mapped. `ours`: it belongs to a unit the change stops.

    `certain`: it was seen; otherwise its memory map could not be read in time, and it may.
    """

    process: Process
    node: str
    ours: bool
    certain: bool = True

    def __str__(self) -> str:
        """For messages."""
        return f"{self.process} {'holds' if self.certain else 'may hold'} {self.node}"


class Npu(Protocol):
    """Who holds the accelerator's device nodes."""

    def holders(self, nodes: Sequence[str], units: Sequence[str]) -> list[Holder]:
        """Every process with one of the nodes open or mapped; `units` says which are ours."""


@dataclass(frozen=True, slots=True)
class MappedFiles:
    """Which files the processes of each running service have mapped, and whose map could not be read in time.

    `by_process`: the same, process by process.
    """

    by_service: Mapping[str, frozenset[str]]
    unread: tuple[Process, ...] = ()
    by_process: Mapping[int, frozenset[str]] = field(default_factory=dict)


class Mappings(Protocol):
    """What runs from which files."""

    def by_service(self) -> MappedFiles:
        """Every service that a change could stop and start again; files as paths, an old overlay's without its root."""


class Inference(Protocol):
    """The pose service, over the bus."""

    def describe(self, timeout_s: float) -> InferenceState | None:
        """Its state, or None while nobody owns the name."""

    def self_test(self, timeout_s: float) -> SelfTest:
        """Runs the golden frame now. Raises `unhealthy` when it cannot be run."""


class Rehearsal(Protocol):
    """Tries the model of a set that is not shown yet, in a process that alone sees it. One trial at a time."""

    def begin(self, runtime: Path, timeout_s: float, *, only_cpu: bool) -> None:
        """The trial of this runtime folder's model has begun, in place of an earlier one.

        Raises `unsupported` where no set can be shown to one process alone, and `unit-failed`.
        """

    def result(self) -> Tried | None:
        """What came of it, asked once; None while it runs. Raises what an image of the set is refused with."""

    def end(self) -> None:
        """No trial runs, and nothing of one is left. Raises `unit-failed` or `step-timeout`."""


class ImageReader(Protocol):
    """Looks inside an image that is not merged, without trusting a path in it."""

    def release(self, image: Path, name: str, kind: Kind) -> dict[str, str]:
        """The image's extension-release keys. Raises `bad-image` when it is absent, not a plain file, or unreadable."""

    def carried(self, image: Path, paths: Sequence[str]) -> frozenset[str]:
        """Those of the absolute paths at which the image has a file. Raises `bad-image` when it cannot be mounted."""


class Store(Protocol):
    """/var/lib/avocado: images named by content, runtimes, and the two links."""

    def image(self, image_id: str) -> Path | None:
        """The path of a complete image, or None."""

    def part(self, image_id: str) -> Path:
        """Where an image is assembled before it is complete."""

    def finish_image(self, extension: Extension) -> Path:
        """The part is synced, read back, hashed and renamed into place. Raises `hash-mismatch`."""

    def write_image(self, extension: Extension, data: bytes) -> Path:
        """An image that was made on the board is in place. Raises `no-space`."""

    def verify_image(self, extension: Extension) -> bool:
        """The stored image is there and its bytes still hash to its name."""

    def verify_made(self, image_id: str) -> bool:
        """As `verify_image`, of an image that was made on this board: nobody signed a hash, so its name has to do."""

    def image_ids(self) -> list[str]:
        """Every complete image."""

    def begun(self) -> dict[str, int]:
        """Every image of which a part is there, and the bytes of the disk that it takes."""

    def remove_image(self, image_id: str) -> None:
        """The image and its part are gone."""

    def remove_part(self, image_id: str) -> None:
        """The part of the image is gone, and what was remembered of it."""

    def free_bytes(self) -> int:
        """What an unprivileged writer could still write."""


class ModuleIndexer(Protocol):
    """Makes kernel modules of several extensions and of the base findable together."""

    def index(self, extensions: Sequence[Extension]) -> str | None:
        """An image in the store with the index over all (highest first), or None where none brings modules.

        Raises `tool-missing`, or `bad-image` with what cannot be indexed.
        """


class Runtimes(Protocol):
    """The runtimes on disk, and which of them the next boot merges."""

    def stage(self, manifest: Manifest, module_index: str | None = None) -> Path:
        """runtimes/<id> complete and durable: the manifest as signed, its links, and that of the board's own index.

        Of one that is in use only what is damaged or lost is written. Raises `bad-manifest` for another of its id.
        """

    def module_index(self, runtime_id: str) -> str | None:
        """The image with this runtime's module index, if it has one."""

    def point_index(self, runtime_id: str, image_id: str | None) -> Path:
        """This image is the runtime's module index; None: it has none. Gives the runtime's folder."""

    def remove(self, runtime_id: str) -> None:
        """runtimes/<id> is gone; the active one is never removed."""

    def ids(self) -> list[str]:
        """Every staged runtime, whatever became of its manifest, and the active one even where its folder is lost."""

    def links(self, runtime_id: str) -> Links:
        """What the runtime's links lead to, the board's own index left out.

        A kind whose folder is lost or cannot be read is not in it: nobody knows, which is not the same as no links.
        """

    def manifest(self, runtime_id: str) -> Manifest:
        """The stored manifest. Raises `not-found`; `bad-manifest` or `newer-schema` where it is damaged or lost."""

    def active(self) -> str | None:
        """The runtime the next boot merges."""

    def previous(self) -> str | None:
        """The runtime before it."""

    def folder(self, runtime_id: str) -> Path:
        """runtimes/<id>, whether or not it exists."""

    def activate(self, runtime_id: str, previous: str | None) -> None:
        """`previous` set, then `active` renamed, directory synced. That rename is the commit of a change."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """How one image arrived."""

    image_id: str
    way: str  # held | delta | full
    base_image_id: str | None
    moved_bytes: int
    note: str = ""  # why a cheaper way was not taken


class Fetcher(Protocol):
    """One server's files. What it says about them is believed only as far as the caller's bounds reach."""

    def get(self, path: str, limit: int, *, exact: bool = False, offset: int = 0) -> Iterator[bytes]:
        """The bytes of a file from `offset` on, as they arrive; never more than `limit` bytes of the whole file.

        With `exact`, the whole file has exactly `limit` bytes. Raises `not-found`, `change-cancelled`, or one of
        `ON_THE_WAY`, as a HostGoneError where asking again is no use.
        """

    def pause(self, seconds: float) -> None:
        """Wait before asking again. Raises `change-cancelled`."""

    def received_bytes(self) -> int:
        """Every byte of every answer's body so far."""

    def close(self) -> None:
        """The connection is gone."""


class Source(Protocol):
    """One verified repository: what it offers is signed, what it sends is bounded and hashed."""

    def manifest(self) -> Manifest:
        """The signed manifest for this board. Every trust decision has been made when this returns."""

    def transfer_sizes(self, extension: Extension, held: Sequence[Extension]) -> tuple[int, str | None]:
        """Bytes the cheapest transfer moves, and the base image it needs (None: the full one)."""

    def fetch(self, extension: Extension, held: Sequence[Extension], progress: Progress) -> Fetched:
        """The image is in the store, verified. `held`: images whose bytes were just verified and may serve as base."""

    def moved_bytes(self) -> int:
        """Everything this repository sent so far, metadata included."""

    def close(self) -> None:
        """The connection is gone."""


class Clock(Protocol):
    """Time, injected."""

    def monotonic(self) -> float:
        """Seconds that never go back; for deadlines."""

    def now(self) -> str:
        """Wall time as RFC 3339 UTC; for printing and records only."""

    def sleep(self, seconds: float) -> None:
        """Wait between two looks at a state."""

    def boot_id(self) -> str:
        """Which boot this is; a trial of another boot is over."""

"""Requests become changes: one at a time, each planned before anything is touched, run in a thread of its own.

A request that the plan refuses never becomes a change; its error goes to the caller. Once the change is in the journal
the caller gets its first record, and everything after that is news to whoever listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from agent.bystanders import Finder
from agent.change.confirmation import Confirmation
from agent.change.engine import Engine
from agent.change.journal import Journal
from agent.change.record import ChangeRecord, NewChange, Outcome, Phase
from agent.change.step import Shutdown
from agent.change.steps.await_confirmation import AwaitConfirmation
from agent.contract import local
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.linked import LinkedRuntime
from agent.contract.manifest import Manifest
from agent.observe import Observer, owned_by
from agent.plan import AGENT_EXTENSION, ChangeKind, Observed, Wanted, leaving, plan_change, shown_runtime
from agent.ports.protocols import MergedSet, Source

_LOG = logging.getLogger("avocado.requests")
_START_PATIENCE_S = 300.0

Listener = Callable[[ChangeRecord], None]


@dataclass(frozen=True, slots=True)
class Ask:
    """What somebody asked for.

    `runtime` is an id, empty for the previous one; `source` a deploy source; `extension` what to enable or disable;
    `await_host`: a change of /etc stays only when they come back over a new connection. `warm_up`: whether a new
    model is tried before anything is stopped; None: as the board is configured.
    """

    kind: ChangeKind
    requested_by: str
    runtime: str = ""
    source: str = ""
    extension: str = ""
    dry_run: bool = False
    await_host: bool = False
    warm_up: bool | None = None


class OpenSources:
    """Sources that are open for the change at work; used by its thread only."""

    def __init__(self, opener: Callable[[str], Source]) -> None:
        self._opener = opener
        self._open: dict[str, Source] = {}

    def open(self, source: str) -> Source:
        """The source, opened at its first use."""
        if source not in self._open:
            self._open[source] = self._opener(source)
        return self._open[source]

    def close(self) -> None:
        """Every opened source is closed."""
        while self._open:
            self._open.popitem()[1].close()


class Planner:
    """Turns an Ask into a change that can be run. Reads only. `warm_up`: where whoever asks does not say."""

    def __init__(
        self, observer: Observer, journal: Journal, sources: OpenSources, finder: Finder, *, warm_up: bool = False
    ) -> None:
        self._warm_up = warm_up
        self._observer = observer
        self._finder = finder
        self._journal = journal
        self._sources = sources

    def plan(self, ask: Ask) -> NewChange:
        """The change. Raises OperationError when the request is refused."""
        observed = self._observer.observe(self._journal)
        warm_up = self._warm_up if ask.warm_up is None else ask.warm_up
        wanted = replace(self._wanted(ask, observed), warm_up=warm_up)
        if ask.kind is ChangeKind.DEPLOY and wanted.manifest is not None and wanted.manifest.id == observed.active:
            # The runtime that is there already: asked for again where an image of it is lost, which its name hides.
            extensions = wanted.manifest.extensions
            lost = {e.image_id for e in extensions} - self._observer.disk.good_images(extensions).keys()
            held = {image: size for image, size in observed.images.items() if image not in lost}
            observed = replace(observed, images=held)
        shown = shown_runtime(observed)
        _keep_the_agent(ask, shown, observed.merged, wanted.manifest)
        gone = leaving(observed, wanted)
        bystanders = self._finder.find(gone, owned_by(gone, observed.releases))
        steps = plan_change(replace(observed, bystanders=bystanders), wanted)
        to = wanted.manifest or (observed.runtimes.get(observed.active or "") if ask.kind is not _UNMERGE else None)
        return NewChange(
            kind=ask.kind.value,
            requested_by=ask.requested_by,
            from_runtime=shown.id if shown else observed.active,
            to_runtime=to.id if to else None,
            steps=steps,
            plan_only=ask.dry_run,
        )

    def _wanted(self, ask: Ask, observed: Observed) -> Wanted:
        match ask.kind:
            case ChangeKind.DEPLOY:
                return self._deployed(ask, observed)
            case ChangeKind.ACTIVATE | ChangeKind.ROLLBACK:
                return Wanted(ask.kind, self._on_disk(ask, observed), await_host=ask.await_host)
            case ChangeKind.ENABLE | ChangeKind.DISABLE:
                return Wanted(ask.kind, self._without_or_with(ask, observed), await_host=ask.await_host)
            case ChangeKind.MERGE | ChangeKind.UNMERGE | ChangeKind.REFRESH:
                return Wanted(ask.kind, None, await_host=ask.await_host)

    def _deployed(self, ask: Ask, observed: Observed) -> Wanted:
        source = self._sources.open(ask.source)
        manifest = source.manifest()
        active = observed.runtimes.get(observed.active or "")
        held = [e for e in (active.extensions if active else ()) if e.image_id in observed.images and e.sha256]
        missing = [e for e in manifest.extensions if e.image_id not in observed.images]
        transfers = {e.image_id: source.transfer_sizes(e, held)[0] for e in missing}
        return Wanted(ask.kind, manifest, ask.source, transfers)

    def _without_or_with(self, ask: Ask, observed: Observed) -> Manifest:
        active = observed.runtimes.get(observed.active or "")
        if active is None:
            raise OperationError(
                ErrorCode.NOT_FOUND,
                f"cannot {ask.kind.value} extension {ask.extension}: no runtime is active",
                "Deploy one from the host: 'avocadoctl -H BOARD deploy'.",
            )
        self._require_manifest(active.id, active)
        change = local.enable if ask.kind is ChangeKind.ENABLE else local.disable
        return change(active, ask.extension)

    def _on_disk(self, ask: Ask, observed: Observed) -> Manifest:
        runtime = ask.runtime or observed.previous
        if runtime is None:
            raise OperationError(
                ErrorCode.NOT_FOUND,
                "cannot roll back: this board has no previous runtime",
                "See which are on disk: avocadoctl runtime list",
            )
        manifest = observed.runtimes.get(runtime)
        self._require_manifest(runtime, manifest)
        if manifest is None:
            raise OperationError(
                ErrorCode.NOT_FOUND,
                f"cannot {'roll back to' if ask.kind is ChangeKind.ROLLBACK else ask.kind.value} runtime {runtime}:"
                " it is not on this board",
                "See which are: avocadoctl runtime list",
            )
        return manifest

    def _require_manifest(self, runtime: str, manifest: Manifest | None) -> None:
        """Nothing is signed but what the manifest says. Raises what is wrong with one that cannot be read."""
        if isinstance(manifest, LinkedRuntime) or (manifest is None and runtime in self._observer.disk.runtimes.ids()):
            self._observer.disk.runtimes.manifest(runtime)


_UNMERGE = ChangeKind.UNMERGE


def _keep_the_agent(ask: Ask, shown: Manifest | None, merged: MergedSet, wanted: Manifest | None) -> None:
    """A change must not take away the unit, the bus policy and the code of the agent that makes it."""
    links = {link.partition("-")[2] for names in merged.names.values() for link in names}
    if AGENT_EXTENSION not in links and (shown is None or not _carries_agent(shown)):
        return  # the agent is part of the base
    if ask.kind is _UNMERGE:
        raise OperationError(
            ErrorCode.UNSUPPORTED,
            f"cannot unmerge: the agent itself runs from extension {AGENT_EXTENSION}",
            "Run 'systemd-sysext unmerge' by hand; 'systemctl restart systemd-sysext' brings everything back.",
        )
    if ask.kind is ChangeKind.DISABLE and ask.extension == AGENT_EXTENSION:
        raise OperationError(
            ErrorCode.REQUIREMENT_UNMET,
            f"cannot disable extension {AGENT_EXTENSION}: this board needs it to change anything again",
            "See the others: avocadoctl ext list",
        )
    if wanted is not None and not _carries_agent(wanted):
        raise OperationError(
            ErrorCode.REQUIREMENT_UNMET,
            f"cannot {ask.kind.value} runtime {wanted.runtime.name} {wanted.runtime.version}: it leaves out"
            f" {AGENT_EXTENSION}, which this board needs to change anything again",
            f"Add {AGENT_EXTENSION} to the runtime's extensions in avocado.yaml.",
        )


def _carries_agent(manifest: Manifest) -> bool:
    return any(extension.name == AGENT_EXTENSION for extension in manifest.extensions)


class Changes:
    """One change at a time. Lives on the event loop; the change itself runs in a thread."""

    def __init__(
        self,
        engine: Engine,
        planner: Planner,
        cancelled: threading.Event,
        cleanup: Callable[[], None],
        listener: Listener,
        confirmation: Confirmation,
    ) -> None:
        self._engine = engine
        self._planner = planner
        self._cancelled = cancelled
        self._cleanup = cleanup
        self._listener = listener
        self._confirmation = confirmation
        self._busy = ""
        self._thread: threading.Thread | None = None
        self._opened = asyncio.Event()
        self._refusal: OperationError | None = None
        self._beginning: Callable[[Listener], None] = lambda _: None
        self.record: ChangeRecord | None = None  # the running one, else the last; never a dry run's
        self._told: ChangeRecord | None = None
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def running(self) -> ChangeRecord | None:
        """The change that runs now."""
        record = self.record
        return record if record is not None and record.outcome is Outcome.RUNNING else None

    @property
    def busy(self) -> bool:
        """Something is at work: a plan, a change, or what the start has to finish first."""
        return bool(self._busy)

    async def begin(self, ask: Ask) -> ChangeRecord:
        """Plan and start a change, and give its first record. Raises `change-running`, or why the plan refuses."""
        await self._open()
        first: asyncio.Future[ChangeRecord] = asyncio.get_running_loop().create_future()
        tell = self._teller(first)

        def work() -> None:
            change = self._planner.plan(ask)
            self._engine.run(change, tell, self._cancelled.is_set)

        job = self._start(f"a {ask.kind.value} asked for by {ask.requested_by}", work)
        either: set[asyncio.Future[Any]] = {first, job}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            job.result()
            raise OperationError(ErrorCode.INTERNAL, f"cannot begin the {ask.kind.value}: it left no record")
        job.add_done_callback(self._check)
        return first.result()

    async def start_with(self, work: Callable[[Listener], None]) -> None:
        """What the agent has to finish before it takes requests; until then they wait.

        When it cannot, it says why. A later request tries again first, and is refused for that reason while it holds.
        """
        self._beginning = work
        try:
            await self._begin()
        finally:
            self._opened.set()

    async def _begin(self) -> None:
        tell = self._teller(None)
        self._refusal = None
        try:
            await self._start("the agent's start", lambda: self._beginning(tell))
        except OperationError as error:
            self._refusal = error
            raise

    async def exclusively(self, what: str, work: Callable[[], None]) -> None:
        """Run something that must not meet a change. Raises `change-running`, and what it raises."""
        await self._open()
        await self._start(what, work)

    async def _open(self) -> None:
        # A board that has just booted is no reason to refuse a deploy.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._opened.wait(), _START_PATIENCE_S)
        if self._refusal is not None:
            await self._begin()

    def cancel(self, number: int) -> None:
        """The running change is asked to stop. Raises `unsupported` where it ends by itself, as in its switch."""
        record = self.running
        if record is None or record.number != number:
            raise OperationError(ErrorCode.NOT_FOUND, f"cannot cancel change {number}: it is not running")
        if not self._engine.cancellable(record):
            step = record.step.kind if record.step else "its end"
            raise OperationError(
                ErrorCode.UNSUPPORTED,
                f"cannot cancel change {number}: it has reached {step}, and now ends by itself",
                f"Wait for it, then: avocadoctl rollback (avocadoctl history show {number})",
            )
        self._cancelled.set()

    def confirm(self, number: int) -> None:
        """Somebody came back for the running change. Raises `not-found` when it does not wait for that."""
        record = self.running
        step = record.step if record is not None and record.number == number else None
        if step is None or step.kind != AwaitConfirmation.kind or step.phase is not Phase.DOING:
            raise OperationError(
                ErrorCode.NOT_FOUND,
                f"cannot confirm change {number}: it does not wait for a confirmation",
                f"See how it stands: avocadoctl history show {number}",
            )
        self._confirmation.give()

    def _start(self, what: str, work: Callable[[], None]) -> asyncio.Future[None]:
        if self._busy:
            running = self.running
            name = f"change {running.number} ({running.kind})" if running else self._busy
            raise OperationError(
                ErrorCode.CHANGE_RUNNING,
                f"cannot begin another change: {name} is at work",
                "Follow it: avocadoctl watch",
                {"change": running.number} if running else {},
            )
        self._busy = what
        self._cancelled.clear()
        loop = asyncio.get_running_loop()
        job: asyncio.Future[None] = loop.create_future()

        def body() -> None:
            error: BaseException | None = None
            try:
                work()
            except Shutdown:
                _LOG.warning("%s was interrupted by the agent's end; the next start decides", what)
                return
            except BaseException as caught:  # noqa: BLE001 - carried to the loop, where it is raised
                error = caught
            finally:
                self._cleanup()
            loop.call_soon_threadsafe(self._ended, job, error)

        # A daemon thread: a step that waits for a device must not keep the agent from ending.
        self._thread = threading.Thread(target=body, name="change", daemon=True)
        self._thread.start()
        return job

    async def interrupted(self, timeout_s: float) -> None:
        """Whatever is at work has left, or the time is up; the adapters answer meanwhile."""
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, timeout_s)

    def _ended(self, job: asyncio.Future[None], error: BaseException | None) -> None:
        self._busy = ""
        if error is None:
            job.set_result(None)
        else:
            job.set_exception(error)
        if self._told is not None:  # `busy` has changed
            self._listener(self._told)

    def _check(self, job: asyncio.Future[None]) -> None:
        error = job.exception()
        if error is not None and not self.failure.done():
            self.failure.set_exception(error)

    def _teller(self, first: asyncio.Future[ChangeRecord] | None) -> Listener:
        loop = asyncio.get_running_loop()

        def on_loop(record: ChangeRecord) -> None:
            self._told = record
            if record.outcome is not Outcome.PLANNED:
                self.record = record
            self._listener(record)
            if first is not None and not first.done():
                first.set_result(record)

        return lambda record: _on(loop, on_loop, record)


def _on(loop: asyncio.AbstractEventLoop, listener: Listener, record: ChangeRecord) -> None:
    loop.call_soon_threadsafe(listener, record)

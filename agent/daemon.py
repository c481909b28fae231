"""avocadod: the only wiring. Configuration, adapters, engine, bus and systemd's notifications meet here.

One event loop owns the connection to the bus. A change runs in a thread of its own and asks the adapters, which hand
their calls back to the loop; the status is gathered in another. At start: what an earlier start left running is
finished or reverted, trial mounts are taken away, and the other half of the boot's merge is done; until then a request
for a change waits. At the end a running change is left as its journal has it, and the next start decides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dbus_fast import BusType
from dbus_fast.aio import MessageBus

from agent import VERSION
from agent.boot import BootHalf
from agent.bus import AgentBus, Board
from agent.bystanders import BystanderFinder
from agent.change import events
from agent.change.confirmation import Confirmation
from agent.change.engine import Engine
from agent.change.journal import Journal
from agent.change.record import ChangeRecord
from agent.change.steps import build_handlers
from agent.config import CONFIG_PATH, Config, load_config
from agent.contract.disk import disk_errors
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.status import StatusDocument
from agent.drift import Left
from agent.extensions import Problem
from agent.itself import started_from
from agent.observe import Disk, Observer, identify, read_board
from agent.ports.clock import SystemClock
from agent.ports.fetch import HttpFetcher, answers
from agent.ports.files import FileStore, write_durably
from agent.ports.images import MountedImages
from agent.ports.inference import BusInference
from agent.ports.mapped import ProcMappings
from agent.ports.modules import DepmodIndexer
from agent.ports.notify import log_to_journal, notify, watchdog_interval_s
from agent.ports.npu import ProcNpu
from agent.ports.overlay import choose_overlay
from agent.ports.privacy import keep_private
from agent.ports.protocols import Source, Switching
from agent.ports.rehearsal import UnitRehearsal
from agent.ports.runtimes import FileRuntimes
from agent.ports.strays import Strays
from agent.ports.systemd import SystemdUnits
from agent.publish import StatusKeeper, said_to_run
from agent.requests import Changes, OpenSources, Planner
from agent.restarts import Restarts
from agent.signals import Signals
from agent.trust import Trust, open_source
from agent.trust_state import Watch

_INFERENCE_TIMEOUT_S = 2.0
_SETTLE_TIMEOUT_S = 30.0
_LOG = logging.getLogger("avocado.daemon")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the daemon until it is told to stop."""
    parser = argparse.ArgumentParser(prog="avocadod", description="The agent; systemd starts it (avocadod.service).")
    parser.add_argument("--config", type=Path, default=CONFIG_PATH, help=f"default: {CONFIG_PATH}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more")
    parser.add_argument("--check", action="store_true", help="only find out whether this agent could start here")
    args = parser.parse_args(argv)
    log_to_journal("avocadod", verbose=args.verbose)
    try:
        config, problems = load_or_default(args.config)
        asyncio.run(check(config) if args.check else serve(config, problems))
    except OperationError as error:
        _LOG.critical("%s%s", error.message, f" (try: {error.remedy})" if error.remedy else "")
        return error.exit_status
    return 0


def load_or_default(path: Path) -> tuple[Config, list[Problem]]:
    """The configuration; where it does not read, the defaults and the problem that says so."""
    try:
        return load_config(path), []
    except OperationError as error:
        # An agent that a wrong file keeps down cannot be told to take the file back.
        _LOG.error("%s; the defaults are used", error.message)
        return Config(), [_problem(error)]


async def serve(config: Config, problems: Sequence[Problem] = ()) -> None:
    """Wire everything, and serve until SIGTERM or until something breaks."""
    signals = Signals(threading.Event(), threading.Event())
    bus = await _connected()
    parts = await wire(config, bus, signals)
    events.event(events.OVERLAY_CHOSEN, *_said_of(parts.observer.identity.switching))
    daemon = Daemon(config, bus, parts, signals)
    daemon.configuration_problems = tuple(problems)
    try:
        await daemon.run()
    finally:
        notify(STOPPING="1")
        signals.stopping.set()
        await daemon.changes.interrupted(config.shutdown_grace_s)
        bus.disconnect()


async def check(config: Config) -> None:
    """Every part is made and nothing is served: whether this agent could start. A change asks that of a new one."""
    bus = await _connected()
    # The trial that asks is no time to try how to switch.
    await wire(config.model_copy(update={"overlay": "reload"}), bus, Signals(threading.Event(), threading.Event()))
    bus.disconnect()


async def _connected() -> MessageBus:
    try:
        return await MessageBus(bus_type=BusType.SYSTEM).connect()
    except OSError as cause:
        raise OperationError(ErrorCode.AGENT_UNREACHABLE, f"cannot reach the system bus: {cause}") from cause


@dataclass(frozen=True, slots=True)
class Parts:
    """What wiring made."""

    clock: SystemClock
    journal: Journal
    engine: Engine
    sources: OpenSources
    confirmation: Confirmation
    observer: Observer
    bystanders: BystanderFinder
    boot: BootHalf
    inference: BusInference
    settle: Callable[[float], None]


async def wire(config: Config, bus: MessageBus, signals: Signals) -> Parts:
    """Make every adapter and put together what stands on them."""
    state = config.state_dir
    keep_private(state)
    clock = SystemClock(signals.wait)
    units = await SystemdUnits.connect(bus)
    inference = BusInference(bus, asyncio.get_running_loop())
    board = identify(read_board(state), VERSION)
    # In a thread: the adapters hand what they ask systemd to this loop.
    overlay, switching = await asyncio.to_thread(
        choose_overlay, units, state, board.os_release, board.arch, wanted=config.overlay
    )
    image = await asyncio.to_thread(started_from, overlay)
    identity = replace(board, switching=switching, agent_image=image)
    store, runtimes, images = FileStore(state), FileRuntimes(state), MountedImages()
    # The state folder of another place is not what systemd merges from.
    root = Path("/") if state == Config().state_dir else None
    disk = Disk(store, runtimes, images, Strays(state, root))
    indexer = DepmodIndexer(store)
    journal = Journal(state / "changes", write_durably)
    trust = Trust(state / "metadata", identity.target, identity.arch, disk.active_manifest, clock.now, write_durably)

    def opener(source: str) -> Source:
        fetcher = HttpFetcher(source, cancelled=signals.is_cancelled, sleep=clock.sleep)
        return open_source(fetcher, trust, store)

    sources = OpenSources(opener)
    confirmation = Confirmation()
    handlers = build_handlers(
        units=units,
        overlay=overlay,
        npu=ProcNpu(),
        inference=inference,
        store=store,
        runtimes=runtimes,
        images=images,
        indexer=indexer,
        rehearsal=UnitRehearsal(units, overlay, switching, config.run_dir / "warm-up.json"),
        source_for=sources.open,
        clock=clock,
        confirmation=confirmation,
        reach=lambda server: answers(HttpFetcher(server, cancelled=signals.is_cancelled)),
    )
    return Parts(
        clock=clock,
        journal=journal,
        engine=Engine(journal, handlers, clock, goes_down=units.goes_down),
        sources=sources,
        confirmation=confirmation,
        observer=Observer(identity, disk, overlay, units, inference),
        bystanders=BystanderFinder(ProcMappings(), images, store, units),
        boot=BootHalf(disk, overlay, units, indexer, config.run_dir / "boot-half.json"),
        inference=inference,
        settle=overlay.settle,
    )


class Daemon:
    """The main loop over the wired parts."""

    def __init__(self, config: Config, bus: MessageBus, parts: Parts, signals: Signals) -> None:
        self._config = config
        self._bus = bus
        self._parts = parts
        self.configuration_problems: tuple[Problem, ...] = ()
        self._start_problems: list[Problem] = []
        self._left = Left()
        self._restarts = Restarts()
        self._trust = Watch(config.state_dir / "metadata")
        planner = Planner(parts.observer, parts.journal, parts.sources, parts.bystanders, warm_up=config.warm_up)
        self.changes = Changes(
            parts.engine, planner, signals.cancelled, parts.sources.close, self._news, parts.confirmation
        )
        self._status = StatusKeeper(
            self._gather,
            lambda: parts.inference.read_document(_INFERENCE_TIMEOUT_S),
            config.run_dir,
            config.status_interval_s,
        )
        active = parts.observer.disk.runtimes.active
        board = Board(self._describe, self._history, active, self._remove, VERSION)
        self._agent_bus = AgentBus(bus, board, self.changes)

    async def run(self) -> None:
        """Serve until SIGTERM. Raises whatever a part of the daemon could not handle."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        with disk_errors(self._config.run_dir):
            self._config.run_dir.mkdir(parents=True, exist_ok=True)
        await self._agent_bus.appear()
        parts = {
            asyncio.create_task(part)
            for part in (stop.wait(), self._start(), self._status.keep(), self._gone(), self._feed_watchdog())
        }
        notify(READY="1", STATUS="Finishing what the last start left")
        waiting: set[asyncio.Future[Any]] = {*parts, self.changes.failure}
        try:
            while not stop.is_set():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for part in done:
                    part.result()
        finally:
            for part in parts:
                part.cancel()

    async def _start(self) -> None:
        try:
            await self.changes.start_with(self._finish_and_boot)
            notify(STATUS="Ready")
            events.event(events.AGENT_READY, logging.INFO, await asyncio.to_thread(self._serves))
        except OperationError as error:
            # The board runs what it runs, and its status can still be asked for.
            _LOG.error("no change can be made: %s", error.message)
            notify(STATUS=error.message)
        self._status.touch()

    def _finish_and_boot(self, listener: Callable[[ChangeRecord], None]) -> None:
        self._start_problems = list(self.configuration_problems)
        unfinished: OperationError | None = None
        try:
            self._recover(listener)
        except OperationError as error:
            # No change may run, but the services of the set that is merged must.
            unfinished = error
        for work in (self._settle, self._boot):
            try:
                work()
            except OperationError as error:
                _LOG.warning("%s", error.message)
                self._start_problems.append(_problem(error))
        if unfinished is not None:
            self._start_problems.append(_problem(unfinished))
            raise unfinished

    def _recover(self, listener: Callable[[ChangeRecord], None]) -> None:
        recovered = self._parts.engine.recover(listener)
        self._left.start(self._parts.journal.changes())
        if recovered is None:
            newest = self._newest()
            if newest is not None:
                listener(newest)

    def _serves(self) -> str:
        active = self._parts.observer.disk.runtimes.active()
        return f"agent {VERSION} ready: {said_to_run(self._gather(None), active)}"

    def _settle(self) -> None:
        self._parts.settle(_SETTLE_TIMEOUT_S)

    def _boot(self) -> None:
        self._start_problems += self._parts.boot.run(
            start_timeout_s=self._config.start_timeout_s, command_timeout_s=self._config.command_timeout_s
        )

    def _newest(self) -> ChangeRecord | None:
        newest, unreadable = self._parts.journal.last_change()
        for error in unreadable:
            _LOG.warning("%s", error.message)
        return newest

    def _news(self, record: ChangeRecord) -> None:
        self._left.note(record)
        self._agent_bus.news(record)
        self._status.touch()
        notify(STATUS=f"Change {record.number} ({record.kind}): {record.step.kind if record.step else record.outcome}")

    def _gather(self, inference: Mapping[str, Any] | None) -> StatusDocument:
        document = self._parts.observer.document(
            self.changes.record,
            inference,
            [
                *self._start_problems,
                *self._parts.boot.damaged(),
                *map(_problem, self._trust.problems()),
                *self._unwritten(),
                *self._differences(inference),
            ],
            busy=self.changes.busy,
            interval_s=self._config.status_interval_s,
            now=self._parts.clock.now(),
        )
        document["problems"] += self._restarts.seen(document["services"], self._parts.clock.monotonic())
        return document

    def _unwritten(self) -> list[Problem]:
        try:
            if not self.changes.busy:
                self._parts.engine.write_late()
        except OperationError as error:
            said = f"the end of the last change is not in the history yet: {error.message}"
            return [Problem(error.code.value, said, error.remedy)]
        return []

    def _differences(self, inference: Mapping[str, Any] | None) -> list[Problem]:
        if self.changes.busy:
            return []
        model = (inference or {}).get("model") or {}
        shown = " ".join(str(model[key]) for key in ("name", "version") if model.get(key))
        return self._left.differences(self._parts.observer.disk.runtimes.active(), shown)

    async def _describe(self) -> str:
        return json.dumps(await self._status.refresh())

    def _history(self, limit: int) -> str:
        records, _ = self._parts.journal.history(limit or self._config.history_limit)
        return json.dumps([record.as_dict() for record in records])

    async def _remove(self, runtime: str) -> None:
        runtimes = self._parts.observer.disk.runtimes
        if runtime not in runtimes.ids():
            raise OperationError(
                ErrorCode.NOT_FOUND,
                f"cannot remove runtime {runtime}: it is not on this board",
                "avocadoctl runtime list",
            )
        await self.changes.exclusively(f"the removal of runtime {runtime}", lambda: runtimes.remove(runtime))
        self._status.touch()

    async def _gone(self) -> None:
        await self._bus.wait_for_disconnect()  # type: ignore[no-untyped-call]
        raise OperationError(ErrorCode.AGENT_UNREACHABLE, "cannot go on: the system bus is gone")

    async def _feed_watchdog(self) -> None:
        interval_s = watchdog_interval_s()
        while interval_s is not None:
            notify(WATCHDOG="1")
            await asyncio.sleep(interval_s / 3)


def _problem(error: OperationError) -> Problem:
    return Problem(error.code.value, error.message, error.remedy)


def _said_of(switching: Switching | None) -> tuple[int, str]:
    if switching is not None and switching.reason:
        return logging.WARNING, f"extensions are switched by systemd's reload, with a gap: {switching.reason}"
    return logging.INFO, "extensions are switched without a gap"


if __name__ == "__main__":
    sys.exit(main())

"""`avocado-infer serve`: the pose service's wiring, and nothing else that decides.

camera -> crop -> supervisor -> page, bus and metrics, in one asyncio loop; the model runs in processes below the
supervisor. Ready means that the first frame was answered or refused, or that the camera is known to be absent.
systemd's watchdog is fed only while the supervisor's heartbeat is fresh, so a hang of either is repaired by a restart,
and an unplugged camera is not a hang. SIGTERM ends it in under two seconds.

Exit status: 0 stopped on request, 1 it could not go on, 78 the configuration must be corrected first.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inference import journal
from inference.accelerator import Accelerator, load_accelerator
from inference.bus import Inference1, serve_on_bus
from inference.capture.feed import CameraFeed
from inference.capture.source import open_camera
from inference.config import AcceleratorConfig, ConfigError, PoseConfig, read_config
from inference.errors import InferenceError
from inference.injection import control_file, write_fault
from inference.journal import event, set_up_logging
from inference.link import SupervisorLink, SupervisorSettings
from inference.model import Model, load_model
from inference.notify import Notifier
from inference.policy import Backend, Reason
from inference.status import CameraView, Event, Identity, Sample, Tally, describe, one_line
from inference.tracking import Tracker
from inference.web.guard import read_token
from inference.web.server import PoseWeb

EXIT_CONFIG = 78
_START_WAIT_S = 60.0
_LOOK_EVERY_S = 0.25
_STATUS_EVERY_S = 5.0

_log = logging.getLogger(__name__)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `serve` to the command line."""
    parser = subparsers.add_parser(
        "serve", help="run the pose service", description="Run the pose service until SIGTERM."
    )
    parser.add_argument("--config", type=Path, help="pose.toml (default: /etc/avocado/pose.toml, if there is one)")
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path(os.environ.get("RUNTIME_DIRECTORY", "/run/avocado-pose").partition(":")[0]),
        help="folder for sockets and control files (default: $RUNTIME_DIRECTORY or /run/avocado-pose)",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log every detail")


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM; returns the exit status."""
    set_up_logging(arguments.verbose)
    try:
        config = read_config(arguments.config)
        return asyncio.run(_serve(config, arguments.run_dir))
    except ConfigError as error:
        _log.error("%s", _in_one_line(error))
        return EXIT_CONFIG
    except InferenceError as error:
        _log.error("%s", _in_one_line(error))
        return 1


async def _serve(config: PoseConfig, run_dir: Path) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    notifier = Notifier()
    notifier.send(STATUS="loading the model")
    token = read_token(Path(config.web.token_file)) if config.web.token_file else None
    run_dir.mkdir(parents=True, exist_ok=True)
    model = load_model(Path(config.model.folder))
    profile = _profile(config)
    accelerator = load_accelerator(profile)
    settings = SupervisorSettings(model_dir=model.folder, profile=profile, run_dir=run_dir)
    link = await SupervisorLink.start(settings)
    try:
        await PoseService(config, model, accelerator, link, token).run(stop, notifier)
    finally:
        notifier.send(STOPPING=1, STATUS="stopping")
        await link.close()
    _log.info("stopped", extra=event(journal.SERVICE_STOPPED))
    return 0


def _profile(config: PoseConfig) -> str:
    path = config.accelerator.profile
    if path == AcceleratorConfig().profile and not Path(path).exists():
        _log.warning("no NPU extension is merged (%s is missing): the CPU serves", path)
        return "cpu"
    return path


def _in_one_line(error: InferenceError) -> str:
    return f"{error.message} (try: {error.remedy})" if error.remedy else error.message


class PoseService:
    """One run of the service around a started supervisor."""

    def __init__(
        self, config: PoseConfig, model: Model, accelerator: Accelerator, link: SupervisorLink, token: str | None
    ) -> None:
        self._config = config
        self._link = link
        self._control = control_file(accelerator)
        self._identity = _identify(config, model, accelerator)
        self._tally = Tally()
        self._camera_problem = ""
        self._decided = asyncio.Event()
        self._web = PoseWeb(self.describe, config.web.jpeg_quality, token)
        self._bus = Inference1(self.describe, link.self_test, self.inject)
        self._feed = CameraFeed(open_camera(config.camera), self._camera_changed)
        self._tracker = Tracker(self._feed, link, model.input_size, self._tally, self._publish)
        link.on_backend_changed(self._backend_changed)

    async def run(self, stop: asyncio.Event, notifier: Notifier) -> None:
        """Serve until `stop` is set; InferenceError when a part cannot go on."""
        runner = await self._web.serve(self._config.web.host, self._config.web.port)
        parts: list[asyncio.Task[Any]] = [
            asyncio.create_task(part)
            for part in (
                self._feed.run(),
                self._track(),
                self._web.encode(),
                serve_on_bus(self._bus),
                self._watch(notifier),
            )
        ]
        stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([stopping, *parts], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._tally.stopping = True
            self._bus.refresh()
            self._feed.stop()
            self._web.close()
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            await runner.cleanup()
        for part in done - {stopping}:
            part.result()

    def describe(self) -> Mapping[str, Any]:
        """The document of the bus, the page and the metrics, as of now."""
        feed = self._feed
        camera = CameraView(feed.source, feed.connected, feed.overwritten, feed.damaged, self._camera_problem)
        return describe(self._identity, self._link.state, camera, self._tally, time.monotonic())

    def inject(self, mode: str) -> None:
        """Give a fault to the simulated NPU."""
        write_fault(self._control, mode)
        self._note("cpu" if mode != "ok" else "npu", f"fault injected: {mode}")
        _log.warning("fault injected: %s", mode, extra=event(journal.FAULT_INJECTED))

    async def _track(self) -> None:
        try:
            await self._link.wait_serving(_START_WAIT_S)
        except InferenceError as error:
            # The page and the bus go on: they say why, and the supervisor tries again.
            self._note("bad", error.message)
            _log.error("%s", _in_one_line(error), extra=event(journal.FRAME_UNANSWERED))
            self._tally.refused()
            self._decided.set()
        await self._tracker.run()

    async def _watch(self, notifier: Notifier) -> None:
        """Tell systemd and the bus how things are; ready once, then the watchdog while the heart beats."""
        watchdog_s = notifier.watchdog_s
        stale_s = watchdog_s / 3 if watchdog_s else 10.0
        ready = fresh = False
        told: tuple[Any, ...] = ()
        while True:
            now = time.monotonic()
            if not self._link.alive:
                raise InferenceError("cannot go on: the supervisor died", "read its last words above in the journal")
            beating = now - self._link.state.heartbeat_monotonic < stale_s
            if fresh and not beating:
                _log.error("the supervisor's heartbeat is %.0f s old", stale_s, extra=event(journal.HEARTBEAT_STALE))
            fresh = beating
            if fresh and watchdog_s:
                notifier.send(WATCHDOG=1)
            if not ready and self._is_decided():
                ready = True
                notifier.send(READY=1)
                _log.info("serving at %s", self._identity.page, extra=event(journal.SERVICE_STARTED))
            document = self.describe()
            # The numbers in the text change all the time; it is sent anew every few seconds and at each switch.
            moment = (now // _STATUS_EVERY_S, ready, document["state"], document["backend"], document["reason"])
            if moment != told:
                told = moment
                notifier.send(STATUS=one_line(document))
            self._bus.refresh()
            await asyncio.sleep(_LOOK_EVERY_S)

    def _is_decided(self) -> bool:
        outcome = self._tally.answered_at or self._tally.unanswered or self._feed.connected is False
        return self._decided.is_set() or bool(outcome)

    def _publish(self, sample: Sample) -> None:
        self._web.publish(sample)

    def _backend_changed(self, before: Backend, after: Backend, reason: Reason) -> None:
        kind = after.value if after is not Backend.NONE else "bad"
        self._note(kind, _switch_in_words(before, after, reason))
        fields = {"BACKEND": after.value, "BACKEND_BEFORE": before.value, "REASON": reason.value}
        level = logging.INFO if reason in {Reason.OK, Reason.STARTING} else logging.WARNING
        _log.log(level, "backend %s -> %s: %s", before, after, reason, extra=event(journal.BACKEND_CHANGED, **fields))
        self._bus.backend_changed(before.value, after.value, reason.value)
        self._bus.refresh()

    def _camera_changed(self, connected: bool, why: str) -> None:
        self._camera_problem = "" if connected else why
        self._note("npu" if connected else "bad", f"camera {why}" if connected else why)
        if connected:
            _log.info("camera %s", why, extra=event(journal.CAMERA_FOUND))
        else:
            _log.warning("%s", why, extra=event(journal.CAMERA_LOST))
        self._bus.refresh()

    def _note(self, kind: str, text: str) -> None:
        self._tally.events.append(Event(datetime.now(UTC).isoformat(timespec="seconds"), kind, text))


def _switch_in_words(before: Backend, after: Backend, reason: Reason) -> str:
    if after is Backend.NONE:
        return f"nothing answers: {reason.value}"
    why = "" if reason in {Reason.OK, Reason.NO_NPU} else f": {reason.value}"
    if before is Backend.NONE:
        return f"{after.value.upper()} answers{why}"
    return f"{before.value.upper()} → {after.value.upper()}{why}"


def _identify(config: PoseConfig, model: Model, accelerator: Accelerator) -> Identity:
    host = config.web.host
    shown = f"[{host}]" if ":" in host else host
    return Identity(
        model_name=model.name,
        model_version=model.version,
        model_folder=str(model.folder),
        required_backend=model.requirements.backend,
        accelerator_name=accelerator.name,
        accelerator_nodes=accelerator.nodes,
        accelerator_settle_s=accelerator.settle_s,
        accelerator_contexts=accelerator.contexts,
        accelerator_has_npu=accelerator.kind == "npu",
        frame_rate_fps=model.requirements.frame_rate_fps,
        page=f"http://{shown}:{config.web.port}/",
    )

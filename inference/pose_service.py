"""One run of the pose service around a started supervisor: camera, frame loop, page, bus and systemd as tasks.

Imported while the supervisor starts: this module's own imports take as long as the runtime's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from inference import journal
from inference.accelerator import Accelerator
from inference.bus import Inference1, serve_on_bus
from inference.capture.feed import CameraFeed
from inference.capture.source import open_camera
from inference.config import PoseConfig
from inference.errors import InferenceError
from inference.injection import control_file, write_fault
from inference.journal import event, in_one_line
from inference.link import SupervisorLink
from inference.model import Model
from inference.notify import Notifier
from inference.policy import Backend, Reason
from inference.status import CameraView, Event, Identity, Sample, Tally, describe, one_line
from inference.tracking import Tracker
from inference.web.guard import read_token
from inference.web.server import PoseWeb

_START_WAIT_S = 60.0
_LOOK_EVERY_S = 0.25
_STATUS_EVERY_S = 5.0

_log = logging.getLogger(__name__)


class PoseService:
    """One run of the service around a started supervisor."""

    def __init__(self, config: PoseConfig, model: Model, accelerator: Accelerator, link: SupervisorLink) -> None:
        token = read_token(Path(config.web.token_file)) if config.web.token_file else None
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
            _log.error("%s", in_one_line(error), extra=event(journal.FRAME_UNANSWERED))
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

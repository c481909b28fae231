"""The service's end of the supervisor: an asyncio client that turns a crop into a pose.

`SupervisorLink.start` spawns the supervisor process, which spawns the zygote, which forks one worker per backend.
Frames travel in one sealed memfd, tokens and answers over one SEQPACKET socket. Every frame asked for is answered by
some backend or refused with an `InferenceError` in bounded time. When the link closes, or its process dies, nothing
that it started lives on. A supervisor that dies or freezes is not restarted here: `state.heartbeat_monotonic` stops,
`infer` raises, the service stops feeding systemd's watchdog, and systemd starts everything anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inference.accelerator import load_accelerator
from inference.errors import InferenceError
from inference.frames import SIDE, SLOTS, FrameRing
from inference.orders import Places, orders_for
from inference.policy import Backend, Phase, Reason
from inference.processes import python_command
from inference.records import NOTE_LIMIT, Ask, Kind, Reply, kind_of, pack_note, unpack_note
from inference.reset import ANSWER, REQUEST

_log = logging.getLogger(__name__)

BackendChanged = Callable[[Backend, Backend, Reason], None]

_START_PATIENCE_S = 15.0
_CLOSE_PATIENCE_S = 2.5
_KILL_PATIENCE_S = 0.5
# The supervisor refuses a frame after ten seconds; only one that is dead or frozen lets it come to this.
_INFER_PATIENCE_S = 12.0
_TEST_PATIENCE_S = 330.0


@dataclass(frozen=True, slots=True)
class SupervisorSettings:
    """What to run and where.

    `profile` is the path of an accelerator profile, or the name of a shipped one. `run_dir` is a writable folder
    (the service's RuntimeDirectory), `cache_dir` the one that keeps compiled graphs (by default the unit's
    CacheDirectory, or one below `run_dir`), and `reset_answer` root's answer to a reset. `overrides` replaces parts of
    the profile, for tests: the same nested keys as the TOML file, for example `{"nodes": [], "delegate": {"options":
    {...}}, "recovery": {"backoff_s": 0.05}}`. `only` starts a single backend, to try it.
    """

    model_dir: Path
    profile: str
    run_dir: Path
    overrides: Mapping[str, Any] = field(default_factory=dict)
    only: Backend | None = None
    cache_dir: Path | None = None
    reset_answer: Path = ANSWER

    def places(self) -> Places:
        """What the supervisor is told of these folders."""
        given = os.environ.get("CACHE_DIRECTORY", "").partition(":")[0]
        cache_dir = self.cache_dir or (Path(given) if given else self.run_dir / "cache")
        return Places(cache_dir.absolute(), (self.run_dir / REQUEST).absolute(), self.reset_answer)


@dataclass(frozen=True, slots=True)
class Answer:
    """One frame's pose (float32[17, 3]: y, x in 0..1 of the crop, score) and who made it.

    `fell_back`: the CPU answered although this board has an NPU; `reason` says why. `latency_ms` counts from `infer`
    being called to the answer.
    """

    sequence: int
    pose: npt.NDArray[np.float32]
    backend: Backend
    reason: Reason
    latency_ms: float
    fell_back: bool


@dataclass(frozen=True, slots=True)
class SupervisorState:
    """What the supervisor said last, twice a second and after each switch.

    `phase` is the preferred backend's. `first_invoke_done`: the preferred backend has answered once or failed once, so
    nothing is compiling any more. `scheduling` is `fifo`, or `normal` and why. `message` and `remedy`: what is wrong
    with a backend now, in words. `backends`: per backend its phase, reason, failures, restarts, oks, first_invoke_ms,
    soft_ms, hard_ms, message and remedy.
    """

    phase: Phase
    backend: Backend
    reason: Reason
    frames: int
    fallbacks: int
    restarts: int
    latency_ms: Mapping[str, float]
    first_invoke_done: bool
    heartbeat_monotonic: float
    workers: Mapping[str, int]
    model: Mapping[str, str]
    scheduling: str
    message: str
    remedy: str
    backends: Mapping[str, Mapping[str, Any]]

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> SupervisorState:
        """The supervisor's own words."""
        enums = {"phase": Phase(fields["phase"]), "backend": Backend(fields["backend"])}
        return cls(**{**fields, **enums, "reason": Reason(fields["reason"])})


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """The golden frame on the serving backend. `oks` is 0.0 when no backend could run it."""

    passed: bool
    backend: Backend
    oks: float
    reason: Reason
    latency_ms: float


class SupervisorLink:
    """A running supervisor, as the service sees it."""

    def __init__(self, process: subprocess.Popen[bytes], channel: socket.socket, ring: FrameRing) -> None:
        self._process = process
        self._channel = channel
        self._ring = ring
        self._loop = asyncio.get_running_loop()
        self._free_slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(SLOTS):
            self._free_slots.put_nowait(slot)
        self._sequence = 0
        self._answers: dict[int, asyncio.Future[Reply]] = {}
        self._tests: dict[int, asyncio.Future[SelfTestResult]] = {}
        self._callbacks: list[BackendChanged] = []
        self._state: SupervisorState | None = None
        self._news = asyncio.Event()
        self._ended = False

    @classmethod
    async def start(cls, settings: SupervisorSettings) -> SupervisorLink:
        """Spawn the supervisor; returns when it is up. Backends may still be starting, or have failed: see `state`."""
        accelerator = load_accelerator(settings.profile, settings.overrides)
        orders = orders_for(accelerator, settings.model_dir, settings.places(), only=settings.only)
        if not orders.lanes:
            raise InferenceError(f"cannot run only the {settings.only}: profile {accelerator.name} has none")
        ring = FrameRing.create()
        ours, process = _spawn(ring)
        link = cls(process, ours, ring)
        ours.send(pack_note(orders.as_dict()))
        link._loop.add_reader(ours.fileno(), link._readable)
        try:
            await link._wait_for_news(lambda state: True, _START_PATIENCE_S, "cannot start the supervisor")
        except BaseException:
            await link.close()
            raise
        return link

    @property
    def state(self) -> SupervisorState:
        """The latest word; its heartbeat is at most half a second older than the supervisor's progress."""
        if self._state is None:
            raise AssertionError("start() returns after the first state")
        return self._state

    @property
    def alive(self) -> bool:
        """Whether the supervisor's end of the link is open."""
        return not self._ended

    @property
    def pid(self) -> int:
        """The supervisor's process."""
        return self._process.pid

    async def infer(self, crop: npt.NDArray[np.uint8]) -> Answer:
        """The pose in a crop uint8[192, 192, 3]; InferenceError when no backend answers. Calls may overlap."""
        if crop.shape != (SIDE, SIDE, 3) or crop.dtype != np.uint8:
            raise ValueError(f"a crop is uint8[{SIDE}, {SIDE}, 3], not {crop.dtype}{list(crop.shape)}")
        began = time.monotonic()
        slot = await self._free_slots.get()
        self._sequence += 1
        sequence = self._sequence
        future: asyncio.Future[Reply] = self._loop.create_future()
        self._answers[sequence] = future
        try:
            self._ring.write(slot, np.ascontiguousarray(crop).data.cast("B"))
            self._send(Ask(slot, sequence).pack())
            async with asyncio.timeout(_INFER_PATIENCE_S):
                reply = await future
        except TimeoutError as error:
            raise InferenceError("cannot answer a frame: the supervisor gives no sign") from error
        finally:
            self._answers.pop(sequence, None)
            self._free_slots.put_nowait(slot)
        pose = np.frombuffer(reply.pose, np.float32).reshape(17, 3)
        latency_ms = (time.monotonic() - began) * 1000
        return Answer(sequence, pose, reply.backend, reply.reason, latency_ms, reply.fell_back)

    async def self_test(self) -> SelfTestResult:
        """Run the golden frame on the serving backend now."""
        self._sequence += 1
        number = self._sequence
        future: asyncio.Future[SelfTestResult] = self._loop.create_future()
        self._tests[number] = future
        try:
            self._send(pack_note({"do": "test", "number": number}))
            async with asyncio.timeout(_TEST_PATIENCE_S):
                return await future
        except TimeoutError as error:
            raise InferenceError("cannot test the model: the supervisor gives no sign") from error
        finally:
            self._tests.pop(number, None)

    async def wait_serving(self, timeout_s: float, *, backend: Backend | None = None) -> Backend:
        """The serving backend (or `backend`, when given), as soon as it serves.

        InferenceError when every backend gave up, when the supervisor ended, or when time is over.
        """

        def settled(state: SupervisorState) -> bool:
            watched = [state.backends[backend]] if backend is not None else list(state.backends.values())
            if all(lane["phase"] == Phase.GAVE_UP for lane in watched):
                raise InferenceError(state.message or "cannot serve: every backend gave up", state.remedy)
            return state.backend is (backend or state.backend) and state.backend is not Backend.NONE

        await self._wait_for_news(settled, timeout_s, f"cannot serve within {timeout_s:.0f} s")
        return self.state.backend

    async def next_state(self) -> SupervisorState:
        """The state after this one; at the latest half a second from now. Returns at once when the supervisor ended."""
        if not self._ended:
            self._news.clear()
            await self._news.wait()
        return self.state

    def on_backend_changed(self, callback: BackendChanged) -> None:
        """Call `callback(from, to, reason)` in the event loop at every switch."""
        self._callbacks.append(callback)

    async def close(self) -> None:
        """Stop the supervisor and everything below it; bounded by about three seconds."""
        if self._ring.closed:
            return
        self._loop.remove_reader(self._channel.fileno())
        self._fail_waiting("cannot answer: the link is closed")
        # At the end of its socket the supervisor ends its workers, then itself.
        self._channel.close()
        if not await self._ended_within(_CLOSE_PATIENCE_S):
            self._process.kill()
            # Only a process stuck in the kernel outlives this; it is then the service manager's to end.
            await self._ended_within(_KILL_PATIENCE_S)
        self._ended = True
        self._ring.close()

    async def _ended_within(self, timeout_s: float) -> bool:
        if self._process.poll() is not None:
            return True
        ended = asyncio.Event()
        pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(pidfd, ended.set)
        try:
            async with asyncio.timeout(timeout_s):
                await ended.wait()
        except TimeoutError:
            return False
        finally:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        return self._process.wait() is not None

    # -- incoming -----------------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            raw = self._channel.recv(NOTE_LIMIT, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except ConnectionResetError:
            raw = b""
        if not raw:
            self._lost()
        elif kind_of(raw) is Kind.POSE:
            reply = Reply.unpack(raw)
            future = self._answers.get(reply.sequence)
            if future is not None and not future.done():
                future.set_result(reply)
        else:
            self._take_note(unpack_note(raw))

    def _take_note(self, note: Mapping[str, Any]) -> None:
        match note["event"]:
            case "state":
                self._state = SupervisorState.parse(note["state"])
                self._news.set()
            case "switched":
                before, after, reason = Backend(note["from"]), Backend(note["to"]), Reason(note["reason"])
                for callback in self._callbacks:
                    callback(before, after, reason)
            case "refused":
                future = self._answers.get(note["sequence"])
                if future is not None and not future.done():
                    future.set_exception(InferenceError(note["message"], note["remedy"]))
            case "tested":
                tested = self._tests.get(note["number"])
                if tested is not None and not tested.done():
                    tested.set_result(_test_result(note))
            case "log":
                fields = {"BACKEND": note["backend"], "PHASE": note["phase"], "REASON": note["reason"]}
                level = logging.INFO if note["reason"] == Reason.OK else logging.WARNING
                _log.log(level, "%s", note["message"], extra=fields)
            case other:
                raise AssertionError(f"the supervisor sent an unknown event {other!r}")

    def _lost(self) -> None:
        self._loop.remove_reader(self._channel.fileno())
        self._ended = True
        self._fail_waiting("cannot answer: the supervisor died")
        self._news.set()

    def _fail_waiting(self, message: str) -> None:
        waiting: list[asyncio.Future[Any]] = [*self._answers.values(), *self._tests.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(InferenceError(message, "restart pose.service"))

    # -- outgoing -----------------------------------------------------------------------------------------------------

    def _send(self, record: bytes) -> None:
        try:
            self._channel.send(record, socket.MSG_DONTWAIT)
        except OSError as error:
            raise InferenceError(
                f"cannot reach the supervisor: {error.strerror or error}", "restart pose.service"
            ) from error

    async def _wait_for_news(
        self, satisfied: Callable[[SupervisorState], bool], timeout_s: float, message: str
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while self._state is None or not satisfied(self._state):
                    if self._ended:
                        raise InferenceError(f"{message}: it died", "read `journalctl -u pose.service`")
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as error:
            why = f": {self._state.message}" if self._state is not None and self._state.message else ""
            raise InferenceError(message + why, self._state.remedy if self._state is not None else "") from error


def _spawn(ring: FrameRing) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            python_command("inference.supervisor", str(theirs.fileno()), str(ring.fd), str(os.getpid())),
            stdin=subprocess.DEVNULL,
            # A command that prints JSON must not have a vendor library's words in it.
            stdout=2,
            pass_fds=[theirs.fileno(), ring.fd],
        )
    return ours, process


def _test_result(note: Mapping[str, Any]) -> SelfTestResult:
    backend, reason = Backend(note["backend"]), Reason(note["reason"])
    return SelfTestResult(note["passed"], backend, note["oks"], reason, note["latency_ms"])

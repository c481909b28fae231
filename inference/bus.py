"""org.avocado.Inference1 on the system bus: translates, decides nothing.

The contract is units/dbus-1/interfaces/org.avocado.Inference1.xml. The service works without a bus and comes back to
one that was restarted. `Inject` is for root only, whatever the bus policy says: the caller's user is asked of the bus.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from dbus_fast import (
    AuthError,
    BusType,
    DBusError,
    InvalidAddressError,
    Message,
    MessageType,
    PropertyAccess,
    RequestNameReply,
    Variant,
)
from dbus_fast.aio import MessageBus
from dbus_fast.annotations import DBusDict, DBusDouble, DBusSignature, DBusStr, DBusUInt64
from dbus_fast.service import ServiceInterface, dbus_method, dbus_property, dbus_signal

from inference.errors import InferenceError
from inference.link import SelfTestResult

NAME = "org.avocado.Inference1"
PATH = "/org/avocado/Inference1"
ERROR_PREFIX = "org.avocado.Error."
_LONGEST_PAUSE_S = 10.0
_CALL_TIMEOUT_S = 5.0
_BUS_ERRORS = (OSError, EOFError, AuthError, InvalidAddressError, DBusError)
_SHOWN = {
    "State": "state",
    "Backend": "backend",
    "BackendReason": "reason",
    "Fallbacks": "fallbacks",
    "Restarts": "restarts",
}

_log = logging.getLogger(__name__)


class Inference1(ServiceInterface):
    """The interface; one object serves every connection the service has in its life."""

    def __init__(
        self,
        describe: Callable[[], Mapping[str, Any]],
        self_test: Callable[[], Awaitable[SelfTestResult]],
        inject: Callable[[str], None],
    ) -> None:
        super().__init__(NAME)
        self._describe = describe
        self._self_test = self_test
        self.inject = inject
        self._told: dict[str, Any] = {}

    def refresh(self) -> None:
        """Emit PropertiesChanged for what changed since the last call; frames and latencies are only read."""
        document = self._describe()
        now = {name: document[key] for name, key in _SHOWN.items()}
        changed = {name: value for name, value in now.items() if self._told.get(name) != value}
        self._told = now
        if changed:
            self.emit_properties_changed(changed)

    @dbus_property(access=PropertyAccess.READ, name="State")
    def state(self) -> DBusStr:
        """See inference.status.State."""
        return str(self._describe()["state"])

    @dbus_property(access=PropertyAccess.READ, name="Backend")
    def backend(self) -> DBusStr:
        """Who answered the last frame."""
        return str(self._describe()["backend"])

    @dbus_property(access=PropertyAccess.READ, name="BackendReason")
    def backend_reason(self) -> DBusStr:
        """Why that backend."""
        return str(self._describe()["reason"])

    @dbus_property(access=PropertyAccess.READ, name="Model")
    def model(self) -> DBusStr:
        """Name and version."""
        model = self._describe()["model"]
        return f"{model['name']} {model['version']}"

    @dbus_property(access=PropertyAccess.READ, name="Frames")
    def frames(self) -> DBusUInt64:
        """Frames answered."""
        return int(self._describe()["frames"])

    @dbus_property(access=PropertyAccess.READ, name="Fallbacks")
    def fallbacks(self) -> DBusUInt64:
        """Frames the CPU answered in place of the NPU."""
        return int(self._describe()["fallbacks"])

    @dbus_property(access=PropertyAccess.READ, name="Restarts")
    def restarts(self) -> DBusUInt64:
        """Workers replaced."""
        return int(self._describe()["restarts"])

    @dbus_property(access=PropertyAccess.READ, name="LatencyP50")
    def latency_p50(self) -> DBusDouble:
        """Milliseconds."""
        return self._latency("p50")

    @dbus_property(access=PropertyAccess.READ, name="LatencyP95")
    def latency_p95(self) -> DBusDouble:
        """Milliseconds."""
        return self._latency("p95")

    @dbus_property(access=PropertyAccess.READ, name="LatencyP99")
    def latency_p99(self) -> DBusDouble:
        """Milliseconds."""
        return self._latency("p99")

    def _latency(self, key: str) -> float:
        return float(self._describe()["latency_ms"][key])

    @dbus_method(name="SelfTest")
    async def self_test(self) -> DBusDict:
        """The golden frame on the serving backend."""
        try:
            result = await self._self_test()
        except InferenceError as error:
            raise _bus_error("Unhealthy", "unhealthy", error) from error
        return {
            "passed": Variant("b", result.passed),
            "backend": Variant("s", result.backend.value),
            "oks": Variant("d", result.oks),
            "reason": Variant("s", result.reason.value),
        }

    @dbus_method(name="Describe")
    def describe(self) -> DBusStr:
        """The whole state as JSON."""
        return json.dumps(self._describe())

    @dbus_method(name="Inject")
    def inject_unchecked(self, mode: DBusStr) -> Annotated[None, DBusSignature("")]:
        """Here for introspection; `_answer_inject` has taken every call before it could come this far."""
        raise AssertionError(f"an Inject({mode}) reached the interface without a check of its caller")

    @dbus_signal(name="BackendChanged")
    def backend_changed(
        self, from_backend: str, to_backend: str, reason: str
    ) -> Annotated[tuple[str, str, str], DBusSignature("sss")]:
        """From, to, reason."""
        return from_backend, to_backend, reason


async def serve_on_bus(interface: Inference1) -> None:
    """Own the name on the system bus, again whenever the bus comes back; until cancelled."""
    pause_s = 1.0
    while True:
        try:
            bus = await MessageBus(bus_type=BusType.SYSTEM).connect()
        except _BUS_ERRORS as error:
            if pause_s == 1.0:
                _log.warning("cannot reach the system bus, serving without it: %s", error)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
            continue
        pause_s = 1.0
        try:
            await _serve(bus, interface)
        except _BUS_ERRORS as error:
            _log.warning("lost the system bus: %s", error)
        finally:
            bus.unexport(PATH, interface)
            bus.disconnect()
        await asyncio.sleep(pause_s)


async def _serve(bus: MessageBus, interface: Inference1) -> None:
    answering: set[asyncio.Task[None]] = set()

    def take(message: Message) -> bool:
        ours = message.path == PATH and message.interface in {NAME, None} and message.member == "Inject"
        if message.message_type is not MessageType.METHOD_CALL or not ours or message.signature != "s":
            return False
        task = asyncio.create_task(_answer_inject(bus, interface, message))
        answering.add(task)
        task.add_done_callback(answering.discard)
        return True

    bus.add_message_handler(take)
    bus.export(PATH, interface)
    reply = await bus.request_name(NAME)
    if reply is not RequestNameReply.PRIMARY_OWNER:
        _log.warning("cannot own %s: another service has it", NAME)
    await bus.wait_for_disconnect()  # type: ignore[no-untyped-call]


async def _answer_inject(bus: MessageBus, interface: Inference1, message: Message) -> None:
    try:
        if await _user_of(bus, message.sender or "") != 0:
            raise _bus_error("NotPermitted", "not-permitted", InferenceError("cannot inject a fault: only root may"))
        try:
            interface.inject(message.body[0])
        except InferenceError as error:
            raise _bus_error("Unsupported", "unsupported", error) from error
        reply = Message.new_method_return(message)
    except DBusError as error:
        reply = Message.new_error(message, error.type, error.text)
    await bus.send(reply)


async def _user_of(bus: MessageBus, sender: str) -> int:
    question = Message(
        destination="org.freedesktop.DBus",
        path="/org/freedesktop/DBus",
        interface="org.freedesktop.DBus",
        member="GetConnectionUnixUser",
        signature="s",
        body=[sender],
    )
    try:
        reply = await asyncio.wait_for(bus.call(question), _CALL_TIMEOUT_S)
    except TimeoutError:
        reply = None
    if reply is None or reply.message_type is not MessageType.METHOD_RETURN:
        return -1
    return int(reply.body[0])


def _bus_error(name: str, code: str, error: InferenceError) -> DBusError:
    document = {"code": code, "message": error.message, "remedy": error.remedy or "", "facts": {}}
    return DBusError(ERROR_PREFIX + name, json.dumps(document))

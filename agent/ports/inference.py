"""The pose service as the agent sees it: `org.avocado.Inference1` on the system bus.

What it says is parsed here into values; a service that is not there is None, and one that answers nonsense is
`unhealthy`. The agent never starts it by asking: calls carry the no-auto-start flag.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from dbus_fast import Message, MessageFlag, Variant
from dbus_fast.aio import MessageBus

from agent.contract.errors import ErrorCode, OperationError
from agent.ports.peer import Peer, PeerError, call
from agent.ports.protocols import InferenceState, SelfTest

NAME = "org.avocado.Inference1"
PATH = "/org/avocado/Inference1"
_ABSENT = ("org.freedesktop.DBus.Error.ServiceUnknown", "org.freedesktop.DBus.Error.NameHasNoOwner")
_SEE = "See why: journalctl -b -n 30 -u pose.service"


class BusInference:
    """The Inference port on the bus. The port's methods are for threads other than the event loop's."""

    def __init__(self, bus: MessageBus, loop: asyncio.AbstractEventLoop) -> None:
        self._bus = bus
        self._peer = Peer(bus, loop, NAME, PATH, NAME)

    def describe(self, timeout_s: float) -> InferenceState | None:
        """Its state, or None while nobody owns the name."""
        document = self._peer.wait(self.read_document(timeout_s), timeout_s)
        return None if document is None else parse_state(document)

    def self_test(self, timeout_s: float) -> SelfTest:
        """Runs the golden frame now. Raises `unhealthy` when it cannot be run."""
        return self._peer.wait(self._self_test(timeout_s), timeout_s)

    async def read_document(self, timeout_s: float) -> dict[str, Any] | None:
        """What `Describe()` says, as it stands, or None while nobody owns the name; for callers on the event loop."""
        try:
            text = (await self._ask("Describe", timeout_s))[0]
        except PeerError as cause:
            if cause.name in _ABSENT:
                return None
            raise _unhealthy(f"cannot ask the pose service for its state: {cause.text}") from cause
        try:
            document = json.loads(text)
        except ValueError as cause:
            raise _unhealthy("cannot read the pose service's state: it is not JSON") from cause
        if not isinstance(document, dict):
            raise _unhealthy("cannot read the pose service's state: it is not a JSON object")
        return document

    async def _self_test(self, timeout_s: float) -> SelfTest:
        try:
            result: dict[str, Variant] = (await self._ask("SelfTest", timeout_s))[0]
            return SelfTest(
                passed=bool(result["passed"].value),
                backend=str(result["backend"].value),
                oks=float(result["oks"].value),
                reason=str(result["reason"].value),
            )
        except PeerError as cause:
            raise _unhealthy(f"cannot run the pose service's self-test: {cause.text or cause.name}") from cause
        except (KeyError, AttributeError, TypeError, ValueError) as cause:
            raise _unhealthy("cannot read the result of the pose service's self-test") from cause

    async def _ask(self, member: str, timeout_s: float) -> list[Any]:
        message = Message(destination=NAME, path=PATH, interface=NAME, member=member, flags=MessageFlag.NO_AUTOSTART)
        return await call(self._bus, message, timeout_s)


def parse_state(document: dict[str, Any]) -> InferenceState:
    """The part of the pose service's state that the agent decides by. Raises `unhealthy` when it makes no sense."""
    try:
        accelerator = document.get("accelerator") or {}
        model = document.get("model") or {}
        return InferenceState(
            state=str(document["state"]),
            backend=str(document["backend"]),
            reason=str(document["reason"]),
            required_backend=str(document.get("required_backend") or "any"),
            model=" ".join(str(model[key]) for key in ("name", "version") if model.get(key)),
            frames=int(document["frames"]),
            camera=bool((document.get("camera") or {}).get("connected")),
            first_invoke_done=bool(document["first_invoke_done"]),
            nodes=tuple(str(node) for node in accelerator.get("nodes") or ()),
            settle_s=float(accelerator.get("settle_s") or 0.0),
            contexts=int(accelerator.get("contexts") or 0),
            message=str(document.get("message") or ""),
        )
    except (KeyError, AttributeError, TypeError, ValueError) as cause:
        raise _unhealthy(f"cannot read the pose service's state: {cause!r}") from cause


def _unhealthy(message: str) -> OperationError:
    return OperationError(ErrorCode.UNHEALTHY, message, _SEE)

"""One peer on the bus, asked from a thread that is not the event loop's.

The daemon has one connection and one event loop; the change engine runs in a thread beside it. A peer turns a method
call into a coroutine on that loop and waits for it with a deadline. What the peer answers with an error is raised as
PeerError, for the adapter that knows what the error means; no answer in time is `step-timeout`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from dbus_fast import Message, MessageType
from dbus_fast.aio import MessageBus

from agent.contract.errors import ErrorCode, OperationError

PROPERTIES = "org.freedesktop.DBus.Properties"
BUS_NAME = "org.freedesktop.DBus"
BUS_PATH = "/org/freedesktop/DBus"

# The loop itself may be a moment late; the coroutine's own deadline comes first and says more.
_GRACE_S = 2.0

T = TypeVar("T")


class PeerError(Exception):
    """The peer answered with an error: its D-Bus name, and its text."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name = name
        self.text = text


class Peer:
    """A name, a path and an interface on one connection. The coroutines run on the loop that made the connection."""

    def __init__(self, bus: MessageBus, loop: asyncio.AbstractEventLoop, name: str, path: str, interface: str) -> None:
        self.bus = bus
        self.name = name
        self._loop = loop
        self._path = path
        self._interface = interface

    async def ask(
        self,
        member: str,
        signature: str = "",
        body: list[Any] | None = None,
        *,
        timeout_s: float,
        path: str | None = None,
        interface: str | None = None,
    ) -> list[Any]:
        """Call a method and give the reply's body. Raises PeerError, or OperationError `step-timeout`."""
        message = Message(
            destination=self.name,
            path=path or self._path,
            interface=interface or self._interface,
            member=member,
            signature=signature,
            body=body or [],
        )
        return await call(self.bus, message, timeout_s)

    async def properties(self, path: str, interface: str, names: list[str], *, timeout_s: float) -> dict[str, Any]:
        """Some properties of an object of this peer."""
        replies = await asyncio.gather(
            *(
                self.ask("Get", "ss", [interface, name], timeout_s=timeout_s, path=path, interface=PROPERTIES)
                for name in names
            )
        )
        return {name: reply[0].value for name, reply in zip(names, replies, strict=True)}

    def wait(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the loop from another thread, and wait for what it returns."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s + _GRACE_S)
        except (TimeoutError, FutureTimeoutError) as cause:
            future.cancel()
            raise no_answer(self.name, timeout_s) from cause


async def call(bus: MessageBus, message: Message, timeout_s: float) -> list[Any]:
    """One call with a deadline. Raises PeerError, or OperationError `step-timeout`."""
    try:
        reply = await asyncio.wait_for(bus.call(message), timeout_s)
    except TimeoutError as cause:
        raise no_answer(str(message.destination), timeout_s) from cause
    if reply is None:
        return []
    if reply.message_type is MessageType.ERROR:
        text = reply.body[0] if reply.body and isinstance(reply.body[0], str) else ""
        raise PeerError(reply.error_name or "", text)
    return list(reply.body)


def no_answer(name: str, timeout_s: float) -> OperationError:
    """The error for a peer that did not answer in time."""
    return OperationError(
        ErrorCode.STEP_TIMEOUT, f"cannot get an answer from {name} on the system bus: nothing in {timeout_s:g} s"
    )

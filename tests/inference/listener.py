"""What somebody on the bus hears of a supervisor: the service's own interface on a real bus, and a client beside it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from dbus_fast import BusType, DBusError
from dbus_fast.aio import MessageBus

from inference.bus import NAME, PATH, Inference1, serve_on_bus
from inference.link import SupervisorLink
from inference.policy import Backend, Reason
from inference.status import CameraView, Identity, Tally, describe

_WAIT_S = 10.0
_IDENTITY = Identity("m", "1", "/m", "npu", "virtual", (), 0.0, 1, True, 30.0, "http://127.0.0.1/")


class Listener:
    """A client that subscribed before anything happened."""

    def __init__(self, proxy: Any, properties: Any) -> None:
        self.switches: list[tuple[str, str, str]] = []
        self._reasons: list[str] = []
        proxy.on_backend_changed(lambda *switch: self.switches.append(switch))
        properties.on_properties_changed(self._changed)

    def heard(self, reason: Reason) -> bool:
        """Whether a switch to the CPU was told, and this reason with it or after it."""
        fell = any(switch[:2] == (Backend.NPU, Backend.CPU) for switch in self.switches)
        return fell and reason in {*self._reasons, *(switch[2] for switch in self.switches)}

    def _changed(self, _: str, changed: dict[str, Any], __: list[str]) -> None:
        if "BackendReason" in changed:
            self._reasons.append(changed["BackendReason"].value)


@contextlib.asynccontextmanager
async def listening(link: SupervisorLink, address: str) -> AsyncIterator[Listener]:
    """The service's interface over this link on the bus of DBUS_SYSTEM_BUS_ADDRESS, which is `address`."""

    def inject(mode: str) -> None:
        raise AssertionError(f"nobody here injects {mode} over the bus")

    camera, tally = CameraView("replay", True), Tally()
    interface = Inference1(
        lambda: describe(_IDENTITY, link.state, camera, tally, time.monotonic()), link.self_test, inject
    )
    link.on_backend_changed(lambda *switch: interface.backend_changed(*(word.value for word in switch)))
    serving = [asyncio.create_task(serve_on_bus(interface)), asyncio.create_task(_refresh(interface))]
    client = await MessageBus(address, bus_type=BusType.SYSTEM).connect()
    try:
        served = await _served(client)
        listener = Listener(served.get_interface(NAME), served.get_interface("org.freedesktop.DBus.Properties"))
        await client.introspect(NAME, PATH)  # an answer comes after the subscription that was asked for before it
        yield listener
    finally:
        client.disconnect()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def _refresh(interface: Inference1) -> None:
    while True:
        interface.refresh()
        await asyncio.sleep(0.02)


async def _served(client: MessageBus) -> Any:
    deadline = time.monotonic() + _WAIT_S
    while True:
        with contextlib.suppress(DBusError):
            introspection = await client.introspect(NAME, PATH)
            if any(interface.name == NAME for interface in introspection.interfaces):
                return client.get_proxy_object(NAME, PATH, introspection)
        assert time.monotonic() < deadline, f"{NAME} did not come to the bus"
        await asyncio.sleep(0.01)

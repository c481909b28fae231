"""The pose service's place on the bus, with answers that a test sets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from dbus_fast import BusType, DBusError, Variant
from dbus_fast.aio import MessageBus
from dbus_fast.annotations import DBusDict, DBusStr
from dbus_fast.service import ServiceInterface, dbus_method

SERVING: dict[str, Any] = {
    "state": "serving",
    "backend": "npu",
    "reason": "ok",
    "required_backend": "npu",
    "model": {"name": "movenet-lightning", "version": "1", "folder": "/usr/share/avocado/model"},
    "accelerator": {"name": "virtual", "nodes": ["/dev/simnpu0"], "settle_s": 0.1, "contexts": 1},
    "frames": 120,
    "fallbacks": 0,
    "restarts": 0,
    "camera": {"source": "replay", "connected": True},
    "first_invoke_done": True,
    "latency_ms": {"p50": 11.0, "p95": 13.0, "p99": 17.0},
    "fps": 15.0,
    "page": "http://127.0.0.1:8080/",
}


class FakeInference(ServiceInterface):
    """org.avocado.Inference1."""

    def __init__(self) -> None:
        super().__init__("org.avocado.Inference1")
        self.document: Any = dict(SERVING)
        self.result = {
            "passed": Variant("b", True),
            "backend": Variant("s", "npu"),
            "oks": Variant("d", 0.97),
            "reason": Variant("s", "ok"),
        }
        self.refuses = ""
        self.hangs = False
        self._bus: MessageBus | None = None

    async def appear(self, address: str) -> None:
        self._bus = await MessageBus(address, bus_type=BusType.SYSTEM).connect()
        self._bus.export("/org/avocado/Inference1", self)
        await self._bus.request_name("org.avocado.Inference1")

    def leave(self) -> None:
        if self._bus is not None:
            self._bus.disconnect()

    @dbus_method("Describe")
    async def describe(self) -> DBusStr:
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        return self.document if isinstance(self.document, str) else json.dumps(self.document)

    @dbus_method("SelfTest")
    def self_test(self) -> DBusDict:
        if self.refuses:
            raise DBusError("org.avocado.Error.Unhealthy", self.refuses)
        return self.result

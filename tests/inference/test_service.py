"""The pose service as systemd, the bus and a browser see it: a real process, real inference, a real bus."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from dbus_fast import BusType, DBusError
from dbus_fast.aio import MessageBus
from dbus_fast.auth import AuthExternal

from inference.bus import NAME, PATH
from tests.bus.private_bus import private_bus
from tests.device.host import find_program
from tests.inference.browser import open_page
from tests.inference.serving import ROOT, WATCHDOG_S, Service, serving, write_pictures

CONTRACT = ROOT / "units/dbus-1/interfaces/org.avocado.Inference1.xml"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One service for the tests that leave it as they found it."""
    folder = tmp_path_factory.mktemp("pose")
    # Not below pytest's own folder, which only this user may enter: one test speaks to the bus as somebody else.
    with tempfile.TemporaryDirectory(prefix="pose-bus-") as public:
        Path(public).chmod(0o755)
        with private_bus(Path(public)) as address:
            yield from _started(folder, address)


def _started(folder: Path, address: str) -> Iterator[Service]:
    with serving(folder, address) as running:
        running.wait_ready()
        asyncio.run(running.wait_status(lambda document: document["backend"] == "npu", 20))
        yield running


@asynccontextmanager
async def on_bus(service: Service) -> Any:
    bus = await MessageBus(service.bus_address, bus_type=BusType.SYSTEM).connect()
    try:
        introspection = await bus.introspect(NAME, PATH)
        yield bus.get_proxy_object(NAME, PATH, introspection).get_interface(NAME)
    finally:
        bus.disconnect()


def test_poses_arrive_from_the_npu_in_pixels_of_the_frame(service: Service) -> None:
    async def scenario() -> None:
        async with service.poses() as events, asyncio.timeout(10):
            seen = [await anext(events) for _ in range(10)]
        assert [event["seq"] for event in seen] == list(range(seen[0]["seq"], seen[0]["seq"] + 10))
        for event in seen:
            assert (event["backend"], event["reason"]) == ("npu", "ok")
            assert (len(event["points"]), event["frame"]) == (17, [640, 360])
            assert 0 < event["latency_ms"] < 1000

    asyncio.run(scenario())


def test_page_bus_and_interface_file_tell_the_same(service: Service) -> None:
    async def scenario() -> None:
        async with on_bus(service) as proxy:
            document = json.loads(await proxy.call_describe())
            page = await service.status()
            for key in ("state", "backend", "reason", "model", "accelerator", "required_backend"):
                assert document[key] == page[key]
            assert 0 < document["deadline_ms"]["soft"] < document["deadline_ms"]["hard"]
            assert await proxy.get_state() == "serving"
            assert await proxy.get_model() == f"{page['model']['name']} {page['model']['version']}"
            assert await proxy.get_frames() >= document["frames"]
            result = await proxy.call_self_test()
            assert (result["passed"].value, result["backend"].value, result["reason"].value) == (True, "npu", "ok")
            assert 0.9 <= result["oks"].value <= 1.0

    asyncio.run(scenario())


def test_the_interface_is_the_one_in_the_contract(service: Service) -> None:
    from dbus_fast.introspection import Interface, Node

    def members(interface: Interface) -> dict[str, set[tuple[str, ...]]]:
        return {
            "methods": {(method.name, method.in_signature, method.out_signature) for method in interface.methods},
            "signals": {(member.name, member.signature) for member in interface.signals},
            "properties": {(member.name, member.signature, member.access.value) for member in interface.properties},
        }

    async def scenario() -> None:
        bus = await MessageBus(service.bus_address, bus_type=BusType.SYSTEM).connect()
        served = await bus.introspect(NAME, PATH)
        bus.disconnect()
        contract = Node.parse(CONTRACT.read_text())
        interface = next(entry for entry in served.interfaces if entry.name == NAME)
        assert members(interface) == members(contract.interfaces[0])

    asyncio.run(scenario())


def test_a_hang_is_answered_by_the_cpu_and_no_frame_is_lost(service: Service) -> None:
    async def scenario() -> None:
        switches: list[tuple[str, str, str]] = []
        async with on_bus(service) as proxy, service.poses() as events, asyncio.timeout(30):
            proxy.on_backend_changed(lambda *switch: switches.append(switch))
            before = await anext(events)
            assert before["backend"] == "npu"
            await proxy.call_inject("hang")
            seen = [before]
            while seen[-1]["reason"] != "hung":
                seen.append(await anext(events))
            assert (seen[-1]["backend"], seen[-1]["fell_back"]) == ("cpu", True)
            # The CPU answered from the soft deadline on, before the NPU's worker was given up.
            assert {event["backend"] for event in seen[-2:]} == {"cpu"}
            status = await service.status()
            assert (status["state"], status["backend"], status["reason"]) == ("degraded", "cpu", "hung")
            await proxy.call_inject("ok")
            while seen[-1]["backend"] != "npu":
                seen.append(await anext(events))
        numbers = [event["seq"] for event in seen]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert switches[0] == ("npu", "cpu", "hung")
        assert switches[-1] == ("cpu", "npu", "ok")
        after = await service.status()
        assert after["unanswered"] == 0
        assert [event["text"] for event in after["events"]][-4:] == [
            "fault injected: hang",
            "NPU → CPU: hung",
            "fault injected: ok",
            "CPU → NPU",
        ]

    asyncio.run(scenario())


def test_only_root_may_inject_a_fault(service: Service) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be somebody else on the bus")

    async def scenario() -> None:
        nobody = MessageBus(service.bus_address, bus_type=BusType.SYSTEM, auth=AuthExternal(65534))
        os.seteuid(65534)
        try:
            await nobody.connect()
        finally:
            os.seteuid(0)
        proxy = nobody.get_proxy_object(NAME, PATH, await nobody.introspect(NAME, PATH)).get_interface(NAME)
        with pytest.raises(DBusError) as refused:
            await proxy.call_inject("crash")
        assert refused.value.type == "org.avocado.Error.NotPermitted"
        assert json.loads(refused.value.text)["message"] == "cannot inject a fault: only root may"
        nobody.disconnect()
        async with on_bus(service) as proxy:
            with pytest.raises(DBusError) as refused:
                await proxy.call_inject("melt")
        assert refused.value.type == "org.avocado.Error.Unsupported"
        assert (await service.status())["backend"] == "npu"

    asyncio.run(scenario())


def test_a_reader_that_sleeps_slows_nobody(service: Service) -> None:
    async def scenario() -> None:
        async with aiohttp.ClientSession(read_bufsize=1024) as session:
            asleep = [await session.get(service.page + path) for path in ("stream", "stream", "api/poses")]
            async with service.poses() as events, asyncio.timeout(10):
                first = await anext(events)
                for _ in range(30):
                    last = await anext(events)
            for answer in asleep:
                answer.close()
        assert last["seq"] == first["seq"] + 30

    asyncio.run(scenario())


def test_the_watchdog_is_fed_only_while_the_supervisor_lives(service: Service) -> None:
    service.forget_notifications()
    service.told(lambda message: message == "WATCHDOG=1", WATCHDOG_S / 2)
    (supervisor,) = (pid for pid in service.descendants() if parent_of(pid) == service.process.pid)
    os.kill(supervisor, signal.SIGSTOP)
    try:
        with pytest.raises(AssertionError, match="no such notification"):
            time_of_last_feeding(service)
    finally:
        os.kill(supervisor, signal.SIGCONT)
    service.told(lambda message: message == "WATCHDOG=1", 5)
    asyncio.run(service.wait_status(lambda document: document["backend"] == "npu", 20))


def time_of_last_feeding(service: Service) -> None:
    """Wait out what is still in flight, then expect another feeding within the watchdog's time."""
    deadline = time.monotonic() + WATCHDOG_S
    while time.monotonic() < deadline:
        service.told(lambda message: message == "WATCHDOG=1", WATCHDOG_S / 2)
    raise RuntimeError("the watchdog was fed although the supervisor stood still")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.timeout(600)  # the first run on a machine installs the browser
def test_the_page_shows_who_answers_and_complains_about_nothing(service: Service, tmp_path: Path) -> None:
    if find_program("chromium", "chromium") is None:
        pytest.skip("chromium is not installed, and could not be: apt-get install chromium")

    async def scenario() -> None:
        badge = "document.getElementById('backend').textContent"
        async with open_page(service.page) as page, on_bus(service) as proxy:
            await page.wait_for(f"{badge} === 'NPU'", 20)
            await page.wait_for("document.getElementById('stream').naturalWidth === 640", 10)
            await proxy.call_inject("hang")
            why = "The NPU hung; its worker was ended and is being replaced"
            await page.wait_for(f"document.getElementById('why').textContent === '{why}'", 20)
            assert await page.evaluate(badge) == "CPU"
            await page.picture(tmp_path / "cpu.png")
            await proxy.call_inject("ok")
            await page.wait_for(f"{badge} === 'NPU'", 20)
            assert page.complaints == []

    asyncio.run(scenario())


def test_a_missing_camera_is_a_state_and_a_missing_bus_a_warning(tmp_path: Path) -> None:
    with serving(tmp_path, "unix:path=/nonexistent/bus", pictures=False) as service:
        service.wait_ready()
        replay = tmp_path / "replay"

        async def scenario() -> None:
            document = await service.wait_status(lambda document: document["state"] == "no-camera", 5)
            assert document["camera"]["problem"] == f"cannot open camera replay:{replay}: it holds no .jpg files"
            service.forget_notifications()
            service.told(lambda message: message == "WATCHDOG=1", WATCHDOG_S)
            write_pictures(replay)
            await service.wait_status(lambda document: document["state"] in {"serving", "degraded"}, 20)

        asyncio.run(scenario())
        assert "cannot reach the system bus, serving without it" in service.log.read_text()


def test_sigterm_ends_everything_before_systemd_would(tmp_path: Path) -> None:
    with serving(tmp_path, "unix:path=/nonexistent/bus") as service:
        service.wait_ready()
        below = service.descendants()
        assert len(below) >= 3
        status, took_s = service.stop()
        assert status == 0
        # Half a second on a quiet machine; TimeoutStopSec= of the unit is five.
        assert took_s < 4
        service.told(lambda message: "STOPPING=1" in message, 1)
        deadline = time.monotonic() + 1
        while (alive := [pid for pid in below if is_running(pid)]) and time.monotonic() < deadline:
            select.select([], [], [], 0.01)
        assert alive == []


def test_a_dead_supervisor_ends_the_service_so_that_systemd_starts_it_anew(tmp_path: Path) -> None:
    with serving(tmp_path, "unix:path=/nonexistent/bus") as service:
        service.wait_ready()
        below = service.descendants()
        (supervisor,) = (pid for pid in below if parent_of(pid) == service.process.pid)
        os.kill(supervisor, signal.SIGKILL)
        assert service.process.wait(5) == 1
        assert "cannot go on: the supervisor died" in service.log.read_text()


def test_a_wrong_configuration_has_a_status_of_its_own(tmp_path: Path) -> None:
    with serving(tmp_path, "unix:path=/nonexistent/bus", config="[camera]\nsorce = 'x'\n") as service:
        assert service.process.wait(20) == 78
        expected = (
            f"ERROR: cannot read {tmp_path}/pose.toml: unknown key camera.sorce (try: did you mean camera.source?)"
        )
        assert service.log.read_text().splitlines() == [expected]

"""The Rehearsal port: one suite for the fake of the crash matrix and for the transient unit of the real adapter.

Then what only the unit promises. What a real systemd and a real set make of it is in tests/device/test_models.py.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from dbus_fast import BusType
from dbus_fast.aio import MessageBus

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import sha256_hex
from agent.ports.overlay import GaplessOverlay
from agent.ports.overlay_reload import ReloadOverlay
from agent.ports.protocols import Overlay, Rehearsal, Switching, Tried, Verdict
from agent.ports.rehearsal import UNIT, UnitRehearsal
from agent.ports.systemd import SystemdUnits
from tests.bus.fake_systemd import FakeSystemd, FakeUnit
from tests.bus.private_bus import private_bus
from tests.change.fakes import FakeRehearsal
from tests.change.world import World

IMAGE = "4ed17979-6ec5-54c0-88d7-28bb04460ec6"
FRAGMENT, DROP_IN = "[Service]\nUser=avocado-infer\n", "[Service]\nNice=1\n"
SAID = {"oks": 0.99, "first_invoke_ms": 12.0, "model": "movenet", "version": "2", "required_backend": "npu"}


class Bench(Protocol):
    """A rehearsal, the runtime to try, and the test's hand on how its trial ends."""

    rehearsal: Rehearsal
    runtime: Path

    def finish(self, backend: str, reason: str) -> None: ...
    def running(self) -> bool: ...


class OfTheFake:
    def __init__(self) -> None:
        self.world = World()
        self.rehearsal = FakeRehearsal(self.world)
        self.runtime = Path("/state/runtimes/r1")

    def finish(self, backend: str, reason: str) -> None:
        self.world.bad = {"r1": reason}
        self.world.npu_is_busy = reason == "busy"
        self.world.now_s += 60

    def running(self) -> bool:
        return self.world.tried is not None


class OfTheUnit:
    def __init__(self, systemd: FakeSystemd, units: SystemdUnits, overlay: Overlay | None = None) -> None:
        self.systemd = systemd
        self.answer = systemd.state / "warm-up.json"
        self.runtime = systemd.state / "runtimes/r1"
        shown = overlay or GaplessOverlay(units, systemd.state, {"ID": "debian"}, "x86_64")
        self.rehearsal = UnitRehearsal(units, shown, Switching("gapless", ""), self.answer)

    def finish(self, backend: str, reason: str) -> None:
        result = SAID | {"passed": reason == "ok", "backend": backend, "reason": reason, "message": "", "remedy": ""}
        self.end_with({"status": 0 if reason == "ok" else 1, "stdout": json.dumps(result), "stderr": ""})

    def end_with(self, answer: object, result: str = "success") -> None:
        self.answer.write_text(answer if isinstance(answer, str) else json.dumps(answer))
        unit = self.systemd.units[UNIT]
        unit.active, unit.result = "inactive" if result == "success" else "failed", result

    def running(self) -> bool:
        return UNIT in self.systemd.units


@pytest.fixture
def systemd(tmp_path: Path) -> FakeSystemd:
    folder = tmp_path / "state/runtimes/r1/sysext"
    folder.mkdir(parents=True)
    (folder / "98-pose-model.raw").symlink_to(f"../../../images/{IMAGE}.raw")
    fake = FakeSystemd(tmp_path / "state", tmp_path / "bin")
    unit, drop_in = tmp_path / "pose.service", tmp_path / "10-board.conf"
    unit.write_text(FRAGMENT)
    drop_in.write_text(DROP_IN)
    fake.add(FakeUnit("pose.service", active="active", files=(str(unit), str(drop_in))))
    return fake


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with private_bus(tmp_path) as found:
        yield found


def on_the_bus(address: str, systemd: FakeSystemd, use: Callable[[SystemdUnits], None]) -> None:
    async def scenario() -> None:
        await systemd.appear(address)
        bus = await MessageBus(address, bus_type=BusType.SYSTEM).connect()
        try:
            await asyncio.to_thread(use, await SystemdUnits.connect(bus))
        finally:
            bus.disconnect()
            systemd.leave()

    asyncio.run(scenario())


# -- the suite of the port


def a_trial_is_none_while_it_runs_and_then_what_it_came_to(bench: Bench) -> None:
    bench.rehearsal.begin(bench.runtime, 60, only_cpu=False)
    assert bench.rehearsal.result() is None
    assert bench.running()
    bench.finish("npu", "ok")
    tried = bench.rehearsal.result()
    assert tried is not None
    assert (tried.verdict, tried.backend, tried.oks, tried.first_invoke_ms) == (Verdict.PASSED, "npu", 0.99, 12.0)
    assert not bench.running()


def a_wrong_result_is_a_failure(bench: Bench) -> None:
    bench.rehearsal.begin(bench.runtime, 60, only_cpu=True)
    bench.finish("cpu", "wrong-result")
    tried = bench.rehearsal.result()
    assert tried is not None
    assert (tried.verdict, tried.backend, bool(tried.why)) == (Verdict.FAILED, "cpu", True)


def a_busy_npu_is_no_verdict(bench: Bench) -> None:
    bench.rehearsal.begin(bench.runtime, 60, only_cpu=False)
    bench.finish("npu", "busy")
    tried = bench.rehearsal.result()
    assert tried is not None
    assert (tried.verdict, tried.is_busy) == (Verdict.UNKNOWN, True)


def an_ended_trial_is_gone_and_ending_none_is_harmless(bench: Bench) -> None:
    bench.rehearsal.end()
    bench.rehearsal.begin(bench.runtime, 60, only_cpu=False)
    bench.rehearsal.end()
    bench.rehearsal.end()
    assert not bench.running()


def a_second_trial_takes_the_place_of_the_first(bench: Bench) -> None:
    bench.rehearsal.begin(bench.runtime, 60, only_cpu=False)
    bench.rehearsal.begin(bench.runtime, 60, only_cpu=True)
    assert bench.rehearsal.result() is None
    bench.finish("cpu", "ok")
    tried = bench.rehearsal.result()
    assert tried is not None
    assert tried.backend == "cpu"


SUITE = [
    a_trial_is_none_while_it_runs_and_then_what_it_came_to,
    a_wrong_result_is_a_failure,
    a_busy_npu_is_no_verdict,
    an_ended_trial_is_gone_and_ending_none_is_harmless,
    a_second_trial_takes_the_place_of_the_first,
]


@pytest.mark.parametrize("check", SUITE, ids=lambda check: check.__name__)
def test_the_fake_keeps_the_port_s_word(check: Callable[[Bench], None]) -> None:
    check(OfTheFake())


@pytest.mark.parametrize("check", SUITE, ids=lambda check: check.__name__)
def test_the_unit_keeps_the_port_s_word(address: str, systemd: FakeSystemd, check: Callable[[Bench], None]) -> None:
    on_the_bus(address, systemd, lambda units: check(OfTheUnit(systemd, units)))
    assert not (systemd.state / "warm-up.json").exists()


# -- what only the unit promises


def test_the_unit_is_closed_gives_way_and_is_told_what_the_service_has(address: str, systemd: FakeSystemd) -> None:
    def use(units: SystemdUnits) -> None:
        bench = OfTheUnit(systemd, units)
        bench.rehearsal.begin(bench.runtime, 60, only_cpu=True)
        unit = systemd.units[UNIT]
        request = json.loads(base64.b64decode(unit.argv[-1]))
        assert [image["image_id"] for image in request["sets"]["sysext"]] == [IMAGE]
        assert request["sets"]["confext"] == []
        assert (request["user"], request["groups"], request["words"]) == (
            "avocado-infer",
            ["video"],
            ["--backend", "cpu"],
        )
        assert request["env"]["CACHE_DIRECTORY"] == "/var/cache/avocado-pose"
        assert request["env"]["OPENBLAS_NUM_THREADS"] == "1"
        # What all this was read from, so that the trial can tell whether the set has it otherwise.
        assert (request["unit"], request["unit_files"]) == (
            "pose.service",
            {"": sha256_hex(FRAGMENT.encode()), "10-board.conf": sha256_hex(DROP_IN.encode())},
        )
        told = unit.properties
        assert (told["Nice"], told["IOSchedulingClass"], told["RuntimeMaxUSec"]) == (19, 3, 80_000_000)
        assert (told["NoNewPrivileges"], told["ProtectSystem"]) == (True, "strict")
        assert told["ReadWritePaths"] == ["-/var/cache/avocado-pose"]
        assert all(len(part) < 128 * 1024 for part in unit.argv), "the kernel takes no more in one argument"
        assert not [part for part in unit.argv if "$" in part], "systemd would put a variable there"

    on_the_bus(address, systemd, use)


@pytest.mark.parametrize(
    ("answer", "result", "why"),
    [
        ("", "oom-kill", f"{UNIT} ended without an answer (oom-kill)"),
        ("[" * 100_000, "success", f"{UNIT} ended without an answer (success)"),
        ('"text"', "timeout", f"{UNIT} ended without an answer (timeout)"),
        (
            {"skipped": "the new set has no /usr/bin/avocado-infer"},
            "success",
            "the new set has no /usr/bin/avocado-infer",
        ),
    ],
)
def test_a_unit_that_says_nothing_of_use_is_no_verdict(
    address: str, systemd: FakeSystemd, answer: object, result: str, why: str
) -> None:
    def use(units: SystemdUnits) -> None:
        bench = OfTheUnit(systemd, units)
        bench.rehearsal.begin(bench.runtime, 60, only_cpu=False)
        bench.end_with(answer, result)
        assert bench.rehearsal.result() == Tried(Verdict.UNKNOWN, why=why)

    on_the_bus(address, systemd, use)


def test_an_image_that_cannot_be_shown_is_refused_as_at_the_switch(address: str, systemd: FakeSystemd) -> None:
    error = OperationError(ErrorCode.BAD_IMAGE, "cannot merge sysext '98-pose-model': it is cut off", "Build it again.")

    def use(units: SystemdUnits) -> None:
        bench = OfTheUnit(systemd, units)
        bench.rehearsal.begin(bench.runtime, 60, only_cpu=False)
        bench.end_with({"error": error.as_dict()})
        with pytest.raises(OperationError) as caught:
            bench.rehearsal.result()
        assert caught.value.as_dict() == error.as_dict()

    on_the_bus(address, systemd, use)


def test_a_board_that_switches_by_reload_cannot_try(address: str, systemd: FakeSystemd) -> None:
    def use(units: SystemdUnits) -> None:
        reload: Any = ReloadOverlay(units, systemd.state)
        rehearsal = UnitRehearsal(units, reload, Switching("reload", "the kernel is too old"), systemd.state / "x")
        with pytest.raises(OperationError) as caught:
            rehearsal.begin(systemd.state, 60, only_cpu=False)
        assert (caught.value.code, caught.value.message) == (
            ErrorCode.UNSUPPORTED,
            "cannot show a set to one process alone: this board switches by reload (the kernel is too old)",
        )
        assert UNIT not in systemd.units

    on_the_bus(address, systemd, use)


def test_a_unit_that_does_not_start_is_unit_failed(address: str, systemd: FakeSystemd) -> None:
    systemd.fail_when = lambda member, name: "failed" if member == "StartTransientUnit" else None

    def use(units: SystemdUnits) -> None:
        bench = OfTheUnit(systemd, units)
        with pytest.raises(OperationError) as caught:
            bench.rehearsal.begin(bench.runtime, 60, only_cpu=False)
        assert caught.value.code is ErrorCode.UNIT_FAILED
        bench.rehearsal.end()
        assert not bench.running()

    on_the_bus(address, systemd, use)

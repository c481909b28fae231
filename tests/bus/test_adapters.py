"""The adapters of systemd, the overlay and the pose service against peers on a real bus."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from dbus_fast import BusType
from dbus_fast.aio import MessageBus

from agent.contract.errors import ErrorCode, OperationError
from agent.order import Relations
from agent.ports.inference import BusInference
from agent.ports.overlay_reload import ReloadOverlay, mount_unit
from agent.ports.protocols import Kind
from agent.ports.systemd import SystemdUnits
from tests.bus.fake_inference import FakeInference
from tests.bus.fake_systemd import FakeSystemd, FakeUnit
from tests.bus.private_bus import private_bus

IMAGE = "../../../images/4ed17979-6ec5-54c0-88d7-28bb04460ec6.raw"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with private_bus(tmp_path) as found:
        yield found


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSystemd:
    state = tmp_path / "state"
    for runtime in ("r1", "r2"):
        for kind in Kind:
            (state / "runtimes" / runtime / kind).mkdir(parents=True)
        (state / "runtimes" / runtime / "sysext" / "98-pose-model.raw").symlink_to(IMAGE)
    (state / "runtimes/r2/sysext/99-new.raw").symlink_to(IMAGE)
    (state / "active").symlink_to("runtimes/r1")
    programs = tmp_path / "bin"
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    fake = FakeSystemd(state, programs)
    for name in ("systemd-sysext.service", "systemd-confext.service", "pose.service"):
        fake.add(FakeUnit(name, active="active"))
    return fake


def against(address: str, peer: FakeSystemd, use: Callable[[SystemdUnits], None]) -> None:
    async def scenario() -> None:
        await peer.appear(address)
        bus = await MessageBus(address, bus_type=BusType.SYSTEM).connect()
        try:
            await asyncio.to_thread(use, await SystemdUnits.connect(bus))
        finally:
            bus.disconnect()
            peer.leave()

    asyncio.run(scenario())


def test_a_unit_is_stopped_and_started_and_its_state_read_afterwards(address: str, systemd: FakeSystemd) -> None:
    def use(units: SystemdUnits) -> None:
        units.stop("pose.service", 5)
        assert units.states(["pose.service"])["pose.service"].active == "inactive"
        units.start("pose.service", 5)
        state = units.states(["pose.service"])["pose.service"]
        assert (state.active, state.main_pid, state.restarts) == ("active", 77, 0)

    against(address, systemd, use)


@pytest.mark.parametrize(("type_", "is_job"), [("oneshot", True), ("simple", False)])
def test_a_unit_that_does_its_work_once_is_told_from_a_service(
    address: str, systemd: FakeSystemd, type_: str, is_job: bool
) -> None:
    systemd.add(FakeUnit("backup.service", active="activating", type=type_))

    def use(units: SystemdUnits) -> None:
        assert units.states(["backup.service"])["backup.service"].is_job is is_job

    against(address, systemd, use)


@pytest.mark.parametrize(("kill_mode", "spares"), [("process", True), ("none", True), ("control-group", False)])
def test_a_unit_whose_other_processes_outlive_its_stop_is_told(
    address: str, systemd: FakeSystemd, kill_mode: str, spares: bool
) -> None:
    systemd.add(FakeUnit("ssh.service", active="active", kill_mode=kill_mode))

    def use(units: SystemdUnits) -> None:
        assert units.states(["ssh.service"])["ssh.service"].spares_others is spares

    against(address, systemd, use)


def test_what_units_have_to_do_with_one_another_is_asked_of_systemd(address: str, systemd: FakeSystemd) -> None:
    systemd.add(FakeUnit("viewer.service", after=("pose.service", "basic.target"), required_by=("kiosk.service",)))

    def use(units: SystemdUnits) -> None:
        assert units.relations(["viewer.service", "pose.service", "no.service"]) == {
            "viewer.service": Relations(frozenset({"pose.service", "basic.target"}), frozenset({"kiosk.service"})),
            "pose.service": Relations(),
        }
        assert units.relations([]) == {}

    against(address, systemd, use)


def test_a_unit_nobody_knows_is_not_found_and_counts_as_stopped(address: str, systemd: FakeSystemd) -> None:
    def use(units: SystemdUnits) -> None:
        assert units.states(["no.service"])["no.service"].load == "not-found"
        units.stop("no.service", 5)
        with pytest.raises(OperationError) as caught:
            units.start("no.service", 5)
        assert caught.value.code is ErrorCode.UNIT_FAILED
        assert caught.value.message == "cannot find unit no.service: systemd has no unit of that name"

    against(address, systemd, use)


@pytest.mark.parametrize("result", ["failed", "dependency", "timeout"])
def test_a_start_job_that_does_not_end_done_is_unit_failed(address: str, systemd: FakeSystemd, result: str) -> None:
    systemd.fail_when = lambda member, name: result if member == "StartUnit" else None

    def use(units: SystemdUnits) -> None:
        with pytest.raises(OperationError) as caught:
            units.start("pose.service", 5)
        assert caught.value.code is ErrorCode.UNIT_FAILED
        assert repr(result) in caught.value.message
        assert caught.value.remedy == "See why: journalctl -b -n 30 -u pose.service"

    against(address, systemd, use)


def test_a_start_that_is_done_but_left_the_unit_failed_is_unit_failed(address: str, systemd: FakeSystemd) -> None:
    def crash_at_once(member: str, name: str) -> str | None:
        if member == "StartUnit":
            systemd.units[name].result = "exit-code"
            return "skipped-but-done"
        return None

    systemd.fail_when = crash_at_once

    def use(units: SystemdUnits) -> None:
        with pytest.raises(OperationError, match=r"cannot bring unit pose\.service to its state"):
            units.start("pose.service", 5)

    against(address, systemd, use)


def test_a_job_that_never_ends_is_a_step_timeout(address: str, systemd: FakeSystemd) -> None:
    systemd.job_removed = lambda *_: None  # type: ignore[method-assign]

    def use(units: SystemdUnits) -> None:
        with pytest.raises(OperationError) as caught:
            units.stop("pose.service", 0.3)
        assert caught.value.code is ErrorCode.STEP_TIMEOUT
        assert "pose.service" in caught.value.message

    against(address, systemd, use)


def test_a_command_runs_as_a_transient_unit_and_its_failure_names_it(address: str, systemd: FakeSystemd) -> None:
    def use(units: SystemdUnits) -> None:
        units.run(["true", "-x"], 5)
        assert ("StartTransientUnit", "true -x") in systemd.calls
        systemd.fail_when = lambda member, name: "failed" if member == "StartTransientUnit" else None
        systemd.exit_status = 2
        with pytest.raises(OperationError) as caught:
            units.run(["false", "now"], 5)
        assert caught.value.message == "cannot run false now: exit-code"
        assert caught.value.facts == {"exit_status": 2}
        assert not [name for name in systemd.units if name.startswith("avocado-run-")]
        with pytest.raises(OperationError) as missing:
            units.run(["no-such-program"], 5)
        assert missing.value.code is ErrorCode.TOOL_MISSING

    against(address, systemd, use)


def test_a_trial_shows_the_new_set_over_the_active_links_and_settles_without_a_trace(
    address: str, systemd: FakeSystemd
) -> None:
    state = systemd.state

    def use(units: SystemdUnits) -> None:
        overlay = ReloadOverlay(units, state)
        overlay.show(state / "runtimes/r1", 5)
        assert overlay.merged().names[Kind.SYSEXT] == ("98-pose-model",)
        overlay.show(state / "runtimes/r2", 5)
        assert overlay.merged().names[Kind.SYSEXT] == ("98-pose-model", "99-new")
        assert (state / "active").readlink() == Path("runtimes/r1")
        mounts = [unit for unit in systemd.units.values() if unit.name.endswith(".mount") and unit.active == "active"]
        assert {unit.what for unit in mounts} == {str(state / "runtimes/r2" / kind) for kind in Kind}
        assert {unit.name for unit in mounts} == {mount_unit(state / "runtimes/r1" / kind) for kind in Kind}
        overlay.settle(5)
        assert not [u for u in systemd.units.values() if u.name.endswith(".mount") and u.active == "active"]
        overlay.show(None, 5)
        assert overlay.merged().names == {Kind.SYSEXT: (), Kind.CONFEXT: ()}

    against(address, systemd, use)


def test_a_stray_in_the_trial_s_folder_is_refused_before_systemd_sees_it(address: str, systemd: FakeSystemd) -> None:
    stray = systemd.state / "runtimes/r2/sysext/._99-new.raw"
    stray.touch()

    def use(units: SystemdUnits) -> None:
        with pytest.raises(OperationError) as caught:
            ReloadOverlay(units, systemd.state).show(systemd.state / "runtimes/r2", 5)
        assert caught.value.message == f"cannot switch the extensions: {stray} is no link to an image of ours"
        assert caught.value.remedy == f"Move {stray} elsewhere."

    against(address, systemd, use)


def test_a_reload_that_fails_is_switch_failed_with_the_journal_to_read(address: str, systemd: FakeSystemd) -> None:
    systemd.fail_when = lambda member, name: "failed" if member == "ReloadOrRestartUnit" else None

    def use(units: SystemdUnits) -> None:
        with pytest.raises(OperationError) as caught:
            ReloadOverlay(units, systemd.state).show(systemd.state / "runtimes/r2", 5)
        assert caught.value.code is ErrorCode.SWITCH_FAILED
        assert caught.value.remedy == "See which: journalctl -b -n 20 -u systemd-sysext.service"

    against(address, systemd, use)


def test_a_reload_that_is_done_but_merged_less_is_switch_failed(address: str, systemd: FakeSystemd) -> None:
    def ignore_one(member: str, name: str) -> str | None:
        if member == "ReloadOrRestartUnit":  # what systemd does with an image for another VERSION_ID
            systemd.set_merged("sysext", ("98-pose-model",))
            return "done"
        return None

    systemd.fail_when = ignore_one

    def use(units: SystemdUnits) -> None:
        with pytest.raises(OperationError) as caught:
            ReloadOverlay(units, systemd.state).show(systemd.state / "runtimes/r2", 5)
        assert caught.value.message == "cannot merge the sysext set: missing 99-new, not wanted nothing"

    against(address, systemd, use)


def with_inference(address: str, use: Callable[[BusInference, FakeInference], Awaitable[None]]) -> None:
    async def scenario() -> None:
        peer = FakeInference()
        bus = await MessageBus(address, bus_type=BusType.SYSTEM).connect()
        try:
            await use(BusInference(bus, asyncio.get_running_loop()), peer)
        finally:
            bus.disconnect()
            peer.leave()

    asyncio.run(scenario())


def test_the_pose_service_is_none_until_it_is_on_the_bus_and_then_what_it_says(address: str) -> None:
    async def use(inference: BusInference, peer: FakeInference) -> None:
        assert await asyncio.to_thread(inference.describe, 2) is None
        await peer.appear(address)
        state = await asyncio.to_thread(inference.describe, 2)
        assert state is not None
        assert (state.backend, state.model, state.nodes) == ("npu", "movenet-lightning 1", ("/dev/simnpu0",))
        test = await asyncio.to_thread(inference.self_test, 2)
        assert (test.passed, test.backend, test.oks) == (True, "npu", 0.97)

    with_inference(address, use)


@pytest.mark.parametrize("document", ["not json", "[1]", {"state": "serving"}, {"frames": "many"}])
def test_a_pose_service_that_answers_nonsense_is_unhealthy(address: str, document: object) -> None:
    async def use(inference: BusInference, peer: FakeInference) -> None:
        await peer.appear(address)
        peer.document = document
        with pytest.raises(OperationError) as caught:
            await asyncio.to_thread(inference.describe, 2)
        assert caught.value.code is ErrorCode.UNHEALTHY

    with_inference(address, use)


def test_a_self_test_that_cannot_run_is_unhealthy_with_its_reason(address: str) -> None:
    async def use(inference: BusInference, peer: FakeInference) -> None:
        await peer.appear(address)
        peer.refuses = "no backend answers"
        with pytest.raises(OperationError) as caught:
            await asyncio.to_thread(inference.self_test, 2)
        assert caught.value.message == "cannot run the pose service's self-test: no backend answers"

    with_inference(address, use)

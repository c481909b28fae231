"""A unit that ignores its stop, or a full /run, does not hold the board between two sets."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from agent.contract.errors import ErrorCode, OperationError
from agent.ports.systemd import SystemdUnits
from tests.bus.fake_systemd import FakeSystemd
from tests.bus.test_adapters import address, against, systemd

__all__ = ["address", "systemd"]


def test_a_unit_that_ignores_sigterm_is_killed_when_its_time_is_up(address: str, systemd: FakeSystemd) -> None:
    systemd.units["pose.service"].ignores_stop = True

    def use(units: SystemdUnits) -> None:
        units.stop("pose.service", 0.3)

    against(address, systemd, use)
    assert systemd.units["pose.service"].active == "inactive"
    assert ("KillUnit", f"pose.service all {int(signal.SIGKILL)}") in systemd.calls


def test_a_frozen_unit_is_thawed_and_stopped(address: str, systemd: FakeSystemd) -> None:
    thawed = ("ThawUnit", "pose.service")
    systemd.fail_when = lambda member, name: None if thawed in systemd.calls else "frozen"
    against(address, systemd, lambda units: units.stop("pose.service", 5))
    assert systemd.units["pose.service"].active == "inactive"
    assert thawed in systemd.calls


def test_a_unit_that_stops_in_time_is_not_killed(address: str, systemd: FakeSystemd) -> None:
    against(address, systemd, lambda units: units.stop("pose.service", 5))
    assert not [name for name, _ in systemd.calls if name == "KillUnit"]


def test_a_unit_that_even_a_kill_does_not_end_is_an_error_that_names_it(
    address: str, systemd: FakeSystemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.ports.systemd._KILL_TIMEOUT_S", 0.3)
    unit = systemd.units["pose.service"]
    unit.ignores_stop = True
    unit.survives_kill = True

    def use(units: SystemdUnits) -> None:
        with pytest.raises(OperationError) as caught:
            units.stop("pose.service", 0.3)
        assert caught.value.code is ErrorCode.STEP_TIMEOUT
        assert "pose.service" in caught.value.message

    against(address, systemd, use)


def test_a_board_that_goes_down_is_told_from_one_that_runs_or_does_not_say(address: str, systemd: FakeSystemd) -> None:
    def use(units: SystemdUnits) -> None:
        assert not units.goes_down()
        systemd.state_of_all = "stopping"
        assert units.goes_down()

    against(address, systemd, use)


def test_a_reload_without_room_says_where_room_is_missing(
    address: str, systemd: FakeSystemd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    systemd.fail_when = lambda member, name: "org.freedesktop.systemd1.DiskFull" if member == "Reload" else None
    remedy = "Free space on /run; see what is there: du -xsh /run/*"

    def use(units: SystemdUnits) -> None:
        with pytest.raises(OperationError) as caught:
            units.reload_manager(5)
        assert (caught.value.code, caught.value.remedy) == (ErrorCode.NO_SPACE, remedy)
        assert caught.value.message == (
            "cannot reload systemd: Refusing to reload, not enough space available on /run/systemd/."
        )
        units.require_reload()
        monkeypatch.setattr("agent.ports.systemd._RELOADS_IN", tmp_path)
        monkeypatch.setattr("agent.ports.systemd._RELOAD_BYTES", 1 << 62)
        with pytest.raises(OperationError) as caught:
            units.require_reload()
        assert (caught.value.code, caught.value.remedy) == (ErrorCode.NO_SPACE, remedy)

    against(address, systemd, use)


def test_a_job_that_somebody_elses_takes_the_place_of_says_so(address: str, systemd: FakeSystemd) -> None:
    systemd.fail_when = lambda member, name: "canceled" if member == "StartUnit" else None

    def use(units: SystemdUnits) -> None:
        with pytest.raises(OperationError) as caught:
            units.start("pose.service", 5)
        assert caught.value.message == (
            "cannot bring unit pose.service to its state: somebody else started or stopped it meanwhile"
        )
        assert caught.value.remedy == "Ask again, and leave pose.service alone until the change has ended."

    against(address, systemd, use)

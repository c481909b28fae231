"""The reset ladder's rungs: what root does for the service, on a fake sysfs and with fake tools, or refuses."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from inference.accelerator import Accelerator, Delegate, Reset
from inference.cli import main
from inference.errors import InferenceError
from inference.policy import Rung
from inference.rungs import Ground, carry_out, take_request

EVERY = (Rung.NEW_WORKER, Rung.REBIND, Rung.RELOAD_MODULE, Rung.REBOOT)


def board(**fields: object) -> Accelerator:
    known = {"name": "board", "kind": "npu", "delegate": Delegate(path="x.so"), "reset": Reset(ladder=EVERY)}
    return Accelerator.model_validate({**known, **fields})


class FakeDriver:
    """A platform device whose driver lets it go and takes it back, as the kernel does at a write."""

    def __init__(self, sysfs: Path, node: Path, *, bound: bool = True, takes_back: bool = True) -> None:
        self.heard: list[str] = []
        self.device = sysfs / "devices/platform/38500000.npu"
        self._driver = sysfs / "bus/platform/drivers/galcore"
        self._node = node
        self._takes_back = takes_back
        for folder in (self.device, self._driver):
            folder.mkdir(parents=True)
        (self.device / "subsystem").symlink_to(sysfs / "bus/platform")
        self._files = {
            "unbind": self._driver / "unbind",
            "bind": self._driver / "bind",
            "drivers_probe": sysfs / "bus/platform/drivers_probe",
        }
        for file in self._files.values():
            os.mkfifo(file)
        if bound:
            self._bind()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        listeners = [threading.Thread(target=self._listen, args=item) for item in self._files.items()]
        for listener in listeners:
            listener.start()
        try:
            yield
        finally:
            for file in self._files.values():
                file.write_text("stop")
            for listener in listeners:
                listener.join(5)

    def _listen(self, what: str, file: Path) -> None:
        while (said := file.read_text()) != "stop":
            self.heard.append(f"{what} {said}")
            if what == "unbind":
                self._node.unlink(missing_ok=True)
                (self.device / "driver").unlink()
            elif self._takes_back:
                self._bind()

    def _bind(self) -> None:
        self._node.touch()
        (self.device / "driver").symlink_to(self._driver)


def test_rebind_takes_the_device_from_its_driver_and_gives_it_back(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path / "sys", tmp_path / "galcore")
    profile = board(
        nodes=(str(tmp_path / "galcore"),), reset=Reset(ladder=EVERY, device="/sys/devices/platform/38500000.npu")
    )
    with driver.running():
        said = carry_out(Rung.REBIND, profile, Ground(sysfs=tmp_path / "sys"))
    assert said == "38500000.npu was taken from galcore and given back"
    assert driver.heard == ["unbind 38500000.npu", "bind 38500000.npu"]
    assert (tmp_path / "galcore").exists()


def test_a_device_that_an_earlier_rebind_left_without_a_driver_is_probed(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path / "sys", tmp_path / "galcore", bound=False)
    profile = board(reset=Reset(ladder=EVERY, device="/sys/devices/platform/38500000.npu"))
    with driver.running():
        carry_out(Rung.REBIND, profile, Ground(sysfs=tmp_path / "sys"))
    assert driver.heard == ["drivers_probe 38500000.npu"]


def test_a_device_that_no_driver_takes_back_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.rungs._BACK_S", 0.1)
    driver = FakeDriver(tmp_path / "sys", tmp_path / "galcore", takes_back=False)
    profile = board(reset=Reset(ladder=EVERY, device="/sys/devices/platform/38500000.npu"))
    with (
        driver.running(),
        pytest.raises(InferenceError, match=r"^cannot rebind 38500000\.npu: no driver took it again$"),
    ):
        carry_out(Rung.REBIND, profile, Ground(sysfs=tmp_path / "sys"))


def test_the_device_behind_a_node_is_found_by_its_number(tmp_path: Path) -> None:
    driver = FakeDriver(tmp_path / "sys", tmp_path / "unused")
    links = tmp_path / "sys/dev/char/1:3"
    links.mkdir(parents=True)
    (links / "device").symlink_to(driver.device)
    with driver.running():
        carry_out(Rung.REBIND, board(nodes=("/dev/null",)), Ground(sysfs=tmp_path / "sys"))
    assert driver.heard == ["unbind 38500000.npu", "bind 38500000.npu"]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """modprobe and systemctl that write down how they were called; modprobe refuses a module called stuck."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("modprobe", "systemctl"):
        tool = folder / name
        tool.write_text(
            f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/called\n'
            'case "$*" in *stuck*) echo "modprobe: FATAL: Module stuck is in use." >&2; exit 1;; esac\n'
        )
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return tmp_path / "called"


def test_modules_are_unloaded_in_order_and_loaded_the_other_way_round(tools: Path) -> None:
    said = carry_out(Rung.RELOAD_MODULE, board(modules=("apex", "gasket")), Ground())
    assert said == "apex, gasket unloaded and loaded"
    assert tools.read_text().splitlines() == [
        "modprobe -r apex",
        "modprobe -r gasket",
        "modprobe gasket",
        "modprobe apex",
    ]


def test_a_module_in_use_is_told_in_the_tools_words(tools: Path) -> None:
    with pytest.raises(InferenceError) as caught:
        carry_out(Rung.RELOAD_MODULE, board(modules=("stuck",)), Ground())
    assert caught.value.message == "cannot modprobe -r stuck: modprobe: FATAL: Module stuck is in use."


def test_reboots_are_counted_across_reboots_and_forgotten_after_an_hour(tmp_path: Path) -> None:
    ground = Ground(reboots=tmp_path / "reboots.json", uptime_s=60)
    assert carry_out(Rung.REBOOT, board(), ground) == "rebooting, 1 of 1"
    with pytest.raises(InferenceError, match=r"^cannot reboot: 1 of 1 reboots were used and the NPU failed again$"):
        carry_out(Rung.REBOOT, board(), ground)
    assert carry_out(Rung.REBOOT, board(), replace(ground, uptime_s=3601)) == "rebooting, 1 of 1"
    ground.reboots.write_text("{torn")
    with pytest.raises(InferenceError, match=r"^cannot reboot: "):
        carry_out(Rung.REBOOT, board(), ground)


@pytest.mark.parametrize("rung", [Rung.REBIND, Rung.RELOAD_MODULE, Rung.REBOOT])
@pytest.mark.parametrize("reset", [Reset(), Reset(ladder=EVERY, limits=dict.fromkeys(EVERY, 0))])
def test_what_the_profile_does_not_grant_is_refused(rung: Rung, reset: Reset, tmp_path: Path) -> None:
    with pytest.raises(InferenceError, match=f"^cannot {rung}: profile board does not grant it$"):
        carry_out(rung, board(reset=reset), Ground(reboots=tmp_path / "reboots.json"))


def request(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({"number": 7, "rung": "reboot", **fields}))


def test_a_request_is_taken_away_and_answered_by_its_number(tmp_path: Path, tools: Path) -> None:
    ask, answer, profile = tmp_path / "ask", tmp_path / "answer", tmp_path / "p.toml"
    profile.write_text(
        'name = "b"\nkind = "npu"\nmodules = ["m"]\n[delegate]\npath = "x"\n'
        '[reset]\nladder = ["new_worker", "reload_module"]\n'
    )
    arguments = ["reset", "--request", str(ask), "--answer", str(answer), "--profile", str(profile)]
    request(ask, rung="reload_module")
    assert main(arguments) == 0
    assert json.loads(answer.read_text()) == {"number": 7, "done": True, "message": "m unloaded and loaded"}
    assert not ask.exists()
    request(ask, number=8)
    assert main(arguments) == 1
    told = {"number": 8, "done": False, "message": "cannot reboot: profile b does not grant it"}
    assert json.loads(answer.read_text()) == told
    assert "systemctl" not in tools.read_text()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"number": 1}', '{"number": 1, "rung": "format"}', "9" * 5000])
def test_what_is_no_request_is_refused_and_taken_away(tmp_path: Path, content: str) -> None:
    path = tmp_path / "ask"
    path.write_text(content)
    with pytest.raises(InferenceError, match=r"^cannot use request "):
        take_request(path)
    assert not path.exists()


def test_neither_a_link_nor_a_pipe_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ask"
    path.symlink_to("/etc/shadow")
    with pytest.raises(InferenceError, match=r"^cannot read request "):
        take_request(path)
    assert not path.is_symlink()
    os.mkfifo(path)
    with pytest.raises(InferenceError, match=r"^cannot use request "):
        take_request(path)
    assert not path.exists()

"""`avocado-infer doctor` names what is wrong on a board, with its remedy, and starts nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from inference.cli import main
from inference.config import parse_config
from inference.measure.doctor import Finding, State, examine
from tests import models
from tests.inference.rig import LIBRARY, MODEL, Rig

PROFILE = """
name = "virtual"
kind = "npu"
nodes = ["{node}"]
modules = ["simnpu"]
[delegate]
path = "{library}"
[pairing.delegate]
rule = "major"
symbol = "simnpu_version"
"""


class Bench:
    """A board in a folder: profile, node, module, pictures in place of a camera, a thermal zone."""

    def __init__(self, rig: Rig) -> None:
        self.folder = rig.folder
        self.node = rig.node
        self.profile = self.folder / "accelerator.toml"
        self.sysfs = self.folder / "sys"
        self.model = MODEL
        self.node.touch()
        self.write_profile(LIBRARY)
        (self.folder / "replay").mkdir()
        (self.folder / "replay/0000.jpg").touch()
        self.config = parse_config(f'[camera]\nsource = "replay:{self.folder}/replay"\n', "pose.toml")
        (self.sysfs / "module/simnpu").mkdir(parents=True)
        (self.sysfs / "module/simnpu/version").write_text("1.2\n")
        self.heat(0, "cpu-thermal", 48, critical=105)

    def write_profile(self, library: Path) -> None:
        self.profile.write_text(PROFILE.format(node=self.node, library=library))

    def heat(self, number: int, name: str, now: int, **trips: int) -> None:
        zone = self.sysfs / f"class/thermal/thermal_zone{number}"
        zone.mkdir(parents=True)
        (zone / "type").write_text(f"{name}\n")
        (zone / "temp").write_text(f"{now * 1000}\n")
        for index, (kind, limit) in enumerate(trips.items()):
            (zone / f"trip_point_{index}_type").write_text(f"{kind}\n")
            (zone / f"trip_point_{index}_temp").write_text(f"{limit * 1000}\n")

    def findings(self) -> list[Finding]:
        return list(examine(self.config, str(self.profile), self.model, self.sysfs))

    def problems(self) -> list[tuple[str, str, str]]:
        return [(one.what, one.found, one.remedy) for one in self.findings() if one.state is State.PROBLEM]


@pytest.fixture
def bench(rig: Rig) -> Bench:
    return Bench(rig)


def test_a_board_that_has_everything_has_no_problem(bench: Bench) -> None:
    found = bench.findings()
    assert [(one.what, one.state) for one in found if one.state is not State.OK] == []
    said = {one.what: one.found for one in found}
    assert said["module"] == "simnpu 1.2"
    assert said["for virtual"] == "cpu.tflite, made for schema 3, runtime 2.2.0, delegate 1.0.0"
    assert said["for cpu"] == "cpu.tflite, made for schema 3, runtime 2.2.0"
    assert said["temperature"] == "cpu-thermal has 48 °C of 105"


def test_what_is_missing_is_named_with_its_remedy(bench: Bench) -> None:
    bench.node.unlink()
    (bench.sysfs / "module/simnpu/version").unlink()
    (bench.sysfs / "module/simnpu").rmdir()
    (bench.folder / "replay/0000.jpg").unlink()
    bench.write_profile(bench.folder / "libgone.so")
    assert bench.problems() == [
        (
            "delegate",
            f"{bench.folder}/libgone.so does not exist",
            "install the board's NPU package, or the npu extension",
        ),
        ("node", f"{bench.node} does not exist", "load the driver; check the npu extension"),
        ("module", "simnpu is not loaded", "modprobe simnpu; see journalctl -k"),
        (
            "camera",
            f"no capture device, and no pictures in {bench.folder}/replay",
            "plug in a camera, or set camera.source in /etc/avocado/pose.toml",
        ),
    ]


def change(bench: Bench, **pairing: str) -> None:
    bench.model = bench.folder / "model"
    bench.model.mkdir()
    for file in MODEL.iterdir():
        (bench.model / file.name).write_bytes(file.read_bytes())
    document = models.read(bench.model)
    document["files"]["virtual"]["pairing"] |= pairing
    models.write(bench.model, document)


def test_a_model_made_for_another_delegate_is_found_out_without_loading_it(bench: Bench) -> None:
    change(bench, delegate="2.1.0")
    assert bench.problems() == [
        (
            "for virtual",
            "cannot run movenet-lightning on virtual: its file was made for delegate 2.1.0, and this board has 1.0.0",
            "prepare the model for this board's delegate, or update the board",
        )
    ]


def test_a_library_that_dies_when_it_is_asked_is_a_finding_and_not_the_end(bench: Bench) -> None:
    bench.profile.write_text(bench.profile.read_text().replace("simnpu_version", "abort"))
    ((what, found, _),) = bench.problems()
    assert what == "for virtual"
    assert found.startswith(f"cannot ask {LIBRARY} for its version: ")


def test_a_damaged_model_and_a_hot_board_are_problems_of_their_own(bench: Bench) -> None:
    change(bench)
    (bench.model / "cpu.tflite").write_bytes(b"cut")
    bench.heat(1, "npu-thermal", 83, passive=85, critical=105)
    (model, temperature) = bench.problems()
    assert (model[0], "cpu.tflite has sha256" in model[1]) == ("model", True)
    assert temperature == (
        "temperature",
        "npu-thermal has 83 °C of 85",
        "cool the board: it slows down or switches off",
    )


def test_it_prints_one_line_a_thing_or_one_document(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    config = bench.folder / "pose.toml"
    config.write_text(f'[camera]\nsource = "replay:{bench.folder}/replay"\n')
    bench.profile.write_text(bench.profile.read_text().replace('modules = ["simnpu"]', ""))
    line = ["doctor", "--config", str(config), "--profile", str(bench.profile), "--model", str(bench.model)]
    assert main(line) == 0
    assert f"ok       node         {bench.node}\n" in capsys.readouterr().out
    bench.node.unlink()
    assert main([*line, "-o", "json"]) == 1
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["healthy"] is False
    assert [one for one in document["findings"] if one["state"] == "problem"] == [
        {
            "what": "node",
            "state": "problem",
            "found": f"{bench.node} does not exist",
            "remedy": "load the driver; check the npu extension",
        }
    ]

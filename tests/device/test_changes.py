"""What a change does on the booted board beside the reference deploy: to services it does not own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.device.board import Board
from tests.device.reference import BOARD, FIRST_MODEL, NEW_MODEL, Reference, wait_until_serving

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]

SERVING_S = 60.0
UNIT = """\
[Unit]
After=pose.service
[Service]
ExecStart=/usr/bin/python3 -I /run/map.py {path}
"""
PROGRAM = """\
import mmap, sys, time
with open(sys.argv[1], "rb") as file:
    held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
time.sleep(1e6)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    if not (NEW_MODEL / "model.json").exists() or not (FIRST_MODEL / "model.json").exists():
        pytest.skip("the models are not prepared; `make model` prepares them")
    return Reference.start(tmp_path_factory.mktemp("changes") / "project")


@pytest.fixture(scope="module")
def serving(new_board: Callable[[], Board], project: Reference) -> Board:
    board = new_board()
    project.provision(board)
    board.boot()
    wait_until_serving(board, SERVING_S)
    return board


def write(board: Board, path: str, text: str) -> None:
    board.exec(["python3", "-I", "-c", "import sys; open(sys.argv[1], 'w').write(sys.argv[2])", path, text])


def shown(board: Board, unit: str, name: str) -> str:
    return board.exec(["systemctl", "show", "--value", "-p", name, unit]).stdout.strip()


def test_a_service_that_maps_the_model_restarts_with_it_and_one_that_does_not_goes_on(
    serving: Board, project: Reference
) -> None:
    model = serving.exec(["find", "/usr/share/avocado", "-name", "*.tflite"]).stdout.split()[0]
    # Units of the base, in a folder that no merge covers.
    write(serving, "/run/map.py", PROGRAM)
    write(serving, "/run/systemd/system/viewer.service", UNIT.format(path=model))
    write(serving, "/run/systemd/system/other.service", UNIT.format(path="/usr/lib/avocado/npu/libsimnpu.so"))
    serving.exec(["systemctl", "daemon-reload"])
    serving.exec(["systemctl", "start", "viewer.service", "other.service"])
    # Nobody could start this one again.
    serving.exec(["systemd-run", "--unit=passing.service", "python3", "-I", "/run/map.py", model])
    units = ("viewer.service", "other.service", "passing.service")
    before = {unit: shown(serving, unit, "MainPID") for unit in units}
    project.use_model(NEW_MODEL)
    try:
        planned = project.deploy(serving, "--dry-run").document
        stops = next(step for step in planned["change"]["facts"]["plan"] if step["kind"] == "stop_services")
        assert stops["inputs"]["units"] == ["pose.service", "viewer.service"]
        assert {unit: shown(serving, unit, "MainPID") for unit in units} == before
        document = project.deploy(serving).document
    finally:
        project.use_model(FIRST_MODEL)
    assert document["outcome"] == "applied", document
    after = {unit: shown(serving, unit, "MainPID") for unit in units}
    assert {unit for unit in units if after[unit] != before[unit]} == {"viewer.service"}
    assert shown(serving, "viewer.service", "ActiveState") == "active"
    pose, viewer = (
        int(shown(serving, unit, "ActiveEnterTimestampMonotonic")) for unit in ("pose.service", "viewer.service")
    )
    assert pose <= viewer

    serving.exec(["systemctl", "stop", *units])
    project.avocadoctl("-H", BOARD, "rollback", board=serving, timeout_s=200)
    assert shown(serving, "viewer.service", "ActiveState") == "inactive"
    wait_until_serving(serving, SERVING_S)

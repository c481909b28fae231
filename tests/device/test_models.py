"""Models on the booted board: which ones its NPU runs, and which are refused before it sees them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import models
from tests.device.board import Board
from tests.device.reference import FIRST_MODEL, NEW_MODEL, Reference, wait_until_serving

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]

SERVING_S = 60.0


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    if not (NEW_MODEL / "model.json").exists() or not (FIRST_MODEL / "model.json").exists():
        pytest.skip("the models are not prepared; `make model` prepares them")
    return Reference.start(tmp_path_factory.mktemp("models") / "project")


@pytest.fixture(scope="module")
def serving(new_board: Callable[[], Board], project: Reference) -> Board:
    board = new_board()
    project.provision(board)
    board.boot()
    wait_until_serving(board, SERVING_S)
    return board


def test_a_model_made_for_another_delegate_is_taken_back_naming_both_versions(
    serving: Board, project: Reference, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(NEW_MODEL, folder)
    document = models.read(folder)
    assert document["files"]["virtual"]["pairing"]["delegate"] == "1.0.0"
    document["files"]["virtual"]["pairing"]["delegate"] = "2.0.0"
    document["version"] = "4.1-other-delegate"
    models.write(folder, document)
    before = project.status(serving)
    project.use_model(folder)
    ran = project.deploy(serving, check=False)
    project.use_model(FIRST_MODEL)
    error = ran.document["error"]
    assert (ran.status, error["code"], ran.document["outcome"]) == (43, "unhealthy", "reverted"), ran
    assert error["message"] == (
        "cannot confirm the new set: model movenet-lightning 4.1-other-delegate requires the NPU, but the backend is "
        "cpu (mismatch): cannot run movenet-lightning on virtual: its file was made for delegate 2.0.0, and this board "
        "has 1.0.0"
    )
    wait_until_serving(serving, SERVING_S)
    after = project.status(serving)
    assert (after["runtime"], after["problems"]) == (before["runtime"], [])

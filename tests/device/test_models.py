"""Models on the booted board: which ones its NPU runs, and which are refused before it sees them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from inference.cli import main as avocado_infer
from tests import models
from tests.device.board import TREE, Board
from tests.device.reference import FIRST_MODEL, NEW_MODEL, Reference, wait_until_serving

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]

SERVING_S = 60.0
ASSETS = TREE / "build/assets"
INFERENCE = ("org.avocado.Inference1", "/org/avocado/Inference1", "org.avocado.Inference1")
# All that the simulated NPU can compute, on a node of its own beside the service's, with time for its slow kernels.
WHOLE = {
    'nodes = ["/dev/simnpu0"]': 'nodes = ["/run/simnpu1"]',
    'node = "/dev/simnpu0"': 'node = "/run/simnpu1"',
    'ops = "ADD"': 'ops = "ADD,CONV_2D,DEPTHWISE_CONV_2D,LOGISTIC,QUANTIZE,RESIZE_BILINEAR"',
    'max_nodes = "1"': 'max_nodes = "0"\nlog = "/run/simnpu1.log"',
    "simnpu-control": "simnpu1-control",
    "soft_ms_floor = 50.0": "soft_ms_floor = 5000.0",
    "soft_ms_ceiling = 200.0": "soft_ms_ceiling = 5000.0",
}


def test_the_doctor_finds_nothing_wrong_beside_the_running_service(serving: Board) -> None:
    found = json.loads(serving.exec(["avocado-infer", "doctor", "-o", "json"]).stdout)["findings"]
    assert [one for one in found if one["state"] == "problem"] == []
    said = {one["what"]: one["found"] for one in found}
    assert said["for virtual"] == "cpu.tflite, made for schema 3, runtime 2.2.0, delegate 1.0.0"
    assert said["camera"] == "replay:/usr/share/avocado/replay"


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


@pytest.fixture(scope="module")
def per_tensor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ASSETS / "movenet-lightning.json").exists():
        pytest.skip("no weights and pictures: run `make model`")
    out = tmp_path_factory.mktemp("per-tensor") / "movenet-lightning"
    graph = str(ASSETS / "movenet-lightning.json")
    options = ["--target", "virtual", "--per-tensor", "--version", "4.1-per-tensor", "--out", str(out)]
    assert avocado_infer(["prepare", graph, *options]) == 0
    assert models.read(out)["files"]["virtual"]["recipe"] == "virtual-per-tensor"
    return out


@pytest.fixture(scope="module")
def deployed(serving: Board, project: Reference, per_tensor: Path) -> dict[str, Any]:
    project.use_model(per_tensor)
    return project.deploy(serving).document


def test_the_per_tensor_model_passes_its_golden_frame_on_the_boards_npu(
    serving: Board, deployed: dict[str, Any]
) -> None:
    assert (deployed["outcome"], deployed["backend"]) == ("applied", "npu")
    tested = json.loads(serving.exec(["busctl", "--json=short", "call", *INFERENCE, "SelfTest"]).stdout)["data"][0]
    said = {key: value["data"] for key, value in tested.items()}
    assert (said["passed"], said["backend"], said["reason"]) == (True, "npu", "ok")
    assert said["oks"] > 0.99


@pytest.mark.usefixtures("deployed")
def test_every_operator_of_the_per_tensor_model_runs_on_the_boards_npu(serving: Board) -> None:
    profile = (TREE / "inference/accelerators/virtual.toml").read_text(encoding="utf-8")
    for old, new in WHOLE.items():
        assert old in profile
        profile = profile.replace(old, new)
    serving.exec(["sh", "-c", "touch /run/simnpu1 && cat > /run/whole.toml"], input_text=profile)
    line = ["avocado-infer", "try", "--model", "/usr/share/avocado/model", "--profile", "/run/whole.toml", "-o", "json"]
    tried = json.loads(serving.exec(line, timeout_s=200).stdout)
    assert (tried["passed"], tried["backend"], tried["version"]) == (True, "npu", "4.1-per-tensor"), tried
    # Its golden pose was computed with one operator on the NPU and XNNPACK for the rest.
    assert tried["oks"] > 0.9
    assert "prepare: 93 of 93 nodes in 1 partitions" in serving.exec(["cat", "/run/simnpu1.log"]).stdout

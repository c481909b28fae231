"""Models on the booted board: which ones its NPU runs, and which are refused before it sees them."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inference.cli import main as avocado_infer
from tests import models
from tests.device.board import TREE, Board
from tests.device.process import holds_within
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


# Two contexts, and a second and a half for a compile that a start with a filled cache does without.
SHARED = {
    "contexts = 1": "contexts = 2",
    'max_nodes = "1"': 'max_nodes = "1"\ncontexts = "2"\nwarmup_ms = "1500"\nlog = "/var/cache/avocado-pose/npu.log"',
}
NPU_LOG = "/var/cache/avocado-pose/npu.log"
WARM_UP = "avocado-warm-up.service"


@pytest.fixture(scope="module")
def serving(new_board: Callable[[], Board], project: Reference, tmp_path_factory: pytest.TempPathFactory) -> Board:
    """The module's board, with an NPU that serves two at once."""
    shared = tmp_path_factory.mktemp("shared") / "virtual.toml"
    shared.write_text(changed_profile(SHARED), encoding="utf-8")
    path = project.folder / "avocado.yaml"
    text = path.read_text(encoding="utf-8")
    shipped = '"{{ avocado.home }}/inference/accelerators/virtual.toml"'
    assert text.count(shipped) == 1
    path.write_text(text.replace(shipped, f'"{shared}"'), encoding="utf-8")
    board = new_board()
    project.provision(board)
    board.boot()
    wait_until_serving(board, SERVING_S)
    return board


def changed_profile(changes: dict[str, str]) -> str:
    text = (TREE / "inference/accelerators/virtual.toml").read_text(encoding="utf-8")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return text


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
    return project.deploy(serving, "--warm-up").document


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
    serving.exec(["sh", "-c", "touch /run/simnpu1 && cat > /run/whole.toml"], input_text=changed_profile(WHOLE))
    line = ["avocado-infer", "try", "--model", "/usr/share/avocado/model", "--profile", "/run/whole.toml", "-o", "json"]
    tried = json.loads(serving.exec(line, timeout_s=200).stdout)
    assert (tried["passed"], tried["backend"], tried["version"]) == (True, "npu", "4.1-per-tensor"), tried
    # Its golden pose was computed with one operator on the NPU and XNNPACK for the rest.
    assert tried["oks"] > 0.9
    assert "prepare: 93 of 93 nodes in 1 partitions" in serving.exec(["cat", "/run/simnpu1.log"]).stdout


# -- tried before anything is stopped


def warmed_up(document: dict[str, Any]) -> dict[str, Any]:
    return next(step for step in document["change"]["steps"] if step["kind"] == "warm_up")


def shown(board: Board, unit: str, *names: str) -> list[str]:
    said = board.exec(["systemctl", "show", *(f"-p{name}" for name in names), unit]).stdout
    values = dict(line.split("=", 1) for line in said.splitlines())
    return [values[name] for name in names]


def test_a_good_model_compiles_beside_the_one_that_serves_and_starts_at_once(
    serving: Board, deployed: dict[str, Any]
) -> None:
    assert (deployed["outcome"], warmed_up(deployed)["warning"]) == ("applied", "")
    tried = deployed["change"]["facts"]["warm_up"]
    assert (tried["backend"], tried["oks"] > 0.9, tried["first_invoke_ms"] > 1500) == ("npu", True, True)
    # The service's own first inference found what the trial had compiled.
    compiles = [line.partition("compile: ")[2].split()[0] for line in npu_log(serving) if "compile: " in line]
    assert compiles[-2:] == ["1500", "cached"]
    said = serving.exec(["journalctl", "-b", "-o", "cat", "-u", WARM_UP, "-u", "pose.service"]).stdout.splitlines()
    begun = max(n for n, line in enumerate(said) if line.startswith(f"Starting {WARM_UP}"))
    during = said[begun : said.index(f"{WARM_UP}: Deactivated successfully.", begun)]
    assert not [line for line in during if line.startswith("Stopping pose.service")]
    assert [line for line in said[begun + len(during) :] if line.startswith("Stopping pose.service")]


def npu_log(board: Board) -> list[str]:
    return board.exec(["cat", NPU_LOG]).stdout.splitlines()


def test_an_agent_that_is_killed_meanwhile_leaves_nothing_and_a_bad_model_is_refused_before_anything_stops(
    serving: Board, project: Reference, tmp_path: Path
) -> None:
    before, pid = project.status(serving), shown(serving, "pose.service", "MainPID")
    mounted = serving.mounts()
    project.use_model(models.spoil_model(NEW_MODEL, tmp_path / "model"))
    ran: list[Any] = []
    deploying = threading.Thread(target=lambda: ran.append(project.deploy(serving, "--warm-up", check=False)))
    deploying.start()
    assert holds_within(lambda: tries(serving), SERVING_S)
    assert rights(serving) == {"User": "avocado-infer", "CapEff": "0000000000000000", "NoNewPrivs": "1"}
    serving.exec(["systemctl", "kill", "--signal=KILL", "--kill-whom=main", "avocadod.service"])
    deploying.join(120)
    assert holds_within(lambda: newest(serving)["outcome"] != "running", SERVING_S)
    record = newest(serving)
    assert (record["outcome"], record["reason"]["code"]) == ("reverted", "change-reverted"), ran
    assert record["steps"][-1]["phase"] == "pending"
    assert shown(serving, WARM_UP, "LoadState", "ActiveState") == ["not-found", "inactive"]
    image = warmed_up({"change": record})["inputs"]["images"][0]["image_id"]
    assert image not in serving.exec(["sh", "-c", "cat /sys/block/loop*/loop/backing_file"], check=False).stdout
    assert serving.mounts() == mounted
    assert serving.exec(["sh", "-c", "ls /run/avocado"]).stdout.split() == ["boot-half.json", "status.json"]

    ran = [project.deploy(serving, "--warm-up", check=False)]
    error = ran[0].document["error"]
    assert (ran[0].status, error["code"], ran[0].document["outcome"]) == (43, "unhealthy", "reverted"), error
    assert error["message"].startswith(
        "cannot warm up model movenet-lightning 0-spoiled: cannot trust the npu: its golden frame has OKS 0."
    )
    assert "stop_services" not in ran[0].document["change"]["facts"]["took_s"]
    after = project.status(serving)
    assert (after["runtime"], after["problems"]) == (before["runtime"], [])
    assert shown(serving, "pose.service", "MainPID") == pid
    assert after["inference"]["unanswered"] == before["inference"]["unanswered"]


def test_a_set_that_changes_the_pose_service_s_own_settings_is_not_judged_by_the_old_ones(
    serving: Board, project: Reference, tmp_path: Path
) -> None:
    """The delegate of this NPU is found only with what the set's own drop-in says."""
    project.use_model(FIRST_MODEL)
    profile, drop_in = tmp_path / "virtual.toml", tmp_path / "10-vendor.conf"
    library = {'path = "/usr/lib/avocado/npu/libsimnpu.so"': 'path = "libsimnpu.so"'}
    profile.write_text(changed_profile(SHARED | library), encoding="utf-8")
    drop_in.write_text("[Service]\nEnvironment=LD_LIBRARY_PATH=/usr/lib/avocado/npu\n", encoding="utf-8")
    path = project.folder / "avocado.yaml"
    before = path.read_text(encoding="utf-8")
    shipped = next(line for line in before.splitlines() if "usr/lib/avocado/npu/libsimnpu.so:" in line)
    added = f'      usr/lib/systemd/system/pose.service.d/10-vendor.conf: "{drop_in}"'
    text = before.replace(shipped, f"{shipped}\n{added}")
    at = text.index("  npu-virtual:")
    profile_line = next(line for line in text[at:].splitlines() if "usr/share/avocado/accelerator.toml:" in line)
    mended = text[at:].replace(profile_line, f'      usr/share/avocado/accelerator.toml: "{profile}"', 1)
    mended = mended.replace("    enable_services:", "    reload_manager: true\n    enable_services:", 1)
    path.write_text(text[:at] + mended, encoding="utf-8")
    try:
        document = project.deploy(serving, "--warm-up").document
    finally:
        path.write_text(before, encoding="utf-8")
    assert (document["outcome"], document["backend"]) == ("applied", "npu")
    assert warmed_up(document)["warning"] == (
        "not tried: the set changes pose.service itself, which systemd has not read yet"
    )
    said = serving.exec(["systemctl", "show", "-p", "Environment", "pose.service"]).stdout
    assert "LD_LIBRARY_PATH=/usr/lib/avocado/npu" in said


def rights(board: Board) -> dict[str, str]:
    """Of the process that runs the new set's own code."""
    main = shown(board, WARM_UP, "MainPID")[0]
    child = board.exec(["cat", f"/proc/{main}/task/{main}/children"]).stdout.split()[0]
    user = board.exec(["stat", "-c", "%U", f"/proc/{child}"]).stdout.strip()
    lines = board.exec(["cat", f"/proc/{child}/status"]).stdout.splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    return {"User": user, "CapEff": status["CapEff"], "NoNewPrivs": status["NoNewPrivs"]}


def newest(board: Board) -> dict[str, Any]:
    said = board.exec(["avocadoctl", "-o", "json", "history", "-n", "1"], check=False).stdout
    return dict(json.loads(said)[0]) if said else {"outcome": "running"}


def tries(board: Board) -> bool:
    """The trial has come as far as the model."""
    main = shown(board, WARM_UP, "MainPID")[0]
    children = board.exec(["cat", f"/proc/{main}/task/{main}/children"], check=False).stdout
    return main != "0" and bool(children.strip())

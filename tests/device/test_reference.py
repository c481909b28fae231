"""The main job on the booted board: deploy, status, refusals, rollback, power cut, through the commands people type.

One board serves the whole module. Each test leaves it serving on its NPU, on the runtime it names.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.contract.errors import EXIT_STATUS, ErrorCode
from tests.device.board import TREE, Board
from tests.device.poses import PoseReader
from tests.device.reference import FIRST_MODEL, NEW_MODEL, PAGE_PORT, Reference, wait_until_serving
from tests.models import spoil_model

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]

SERVING_S = 60.0


@pytest.fixture(scope="module")
def viewer(serving: Board) -> Iterator[PoseReader]:
    with serving.forward(PAGE_PORT) as page, PoseReader(page.port) as reader:
        reader.wait_for(lambda seen: seen.backend == "npu", SERVING_S)
        yield reader


def active(board: Board) -> str:
    return board.exec(["readlink", "/var/lib/avocado/active"]).stdout.strip().rpartition("/")[2]


def main_pid(board: Board) -> str:
    return board.exec(["systemctl", "show", "-P", "MainPID", "pose.service"]).stdout.strip()


def test_status_the_bus_systemd_and_the_journal_agree(serving: Board) -> None:
    said = json.loads(serving.ssh(["avocadoctl", "-o", "json", "status"]).stdout)
    assert said["problems"] == []
    assert said["runtime"]["id"] == active(serving)

    merged = json.loads(serving.exec(["systemd-sysext", "status", "--json=short"]).stdout)
    from_systemd = {name for row in merged if row["hierarchy"] == "/usr" for name in row["extensions"]}
    assert from_systemd == {row["merge_name"] for row in said["extensions"] if row["isSysext"] and row["isMerged"]}

    tree = serving.exec(["busctl", "introspect", "org.avocado.Agent1", "/org/avocado/Agent1"]).stdout
    for member in (".Deploy", ".Describe", ".Rollback", ".ActiveRuntime"):
        assert re.search(rf"^{re.escape(member)}\s", tree, re.MULTILINE), tree
    assert said["runtime"]["id"] in tree

    started = serving.exec(["journalctl", "-u", "avocadod", "-b", "-o", "cat"]).stdout
    assert said["runtime"]["id"] in started, started


def test_status_works_from_the_host_and_as_text(serving: Board, project: Reference) -> None:
    assert project.status(serving)["runtime"]["id"] == active(serving)
    text = serving.ssh(["avocadoctl", "status"]).stdout
    assert re.search(r"^Inference +serving on npu", text, re.MULTILINE), text
    assert re.search(r"^Problems +none", text, re.MULTILINE), text


def test_a_hung_npu_is_answered_by_the_cpu_and_comes_back(serving: Board, viewer: PoseReader) -> None:
    began = time.monotonic()
    serving.ssh(["avocado-infer", "inject", "hang"], timeout_s=45)
    fell = viewer.wait_for(lambda seen: seen.backend == "cpu", 5, since=began)
    back = viewer.wait_for(lambda seen: seen.backend == "npu", SERVING_S, since=fell.at)
    numbers = [seen.sequence for seen in viewer.seen if began <= seen.at <= back.at]
    assert numbers == list(range(numbers[0], numbers[-1] + 1)), "a frame stayed without an answer"
    # Only the hard deadline can tell; a machine in a hurry is given the benefit of the doubt before it.
    assert {seen.reason for seen in viewer.seen if fell.at <= seen.at < back.at} <= {"slow", "hung", "starting"}


def test_a_deploy_signed_by_a_stranger_is_refused_and_the_service_never_stops(
    serving: Board, project: Reference, tmp_path: Path
) -> None:
    before, pid = active(serving), main_pid(serving)
    keys = tmp_path / "keys"
    project.avocadoctl("keys", "init", "--keys", str(keys), "--no-passphrase")
    project.use_model(NEW_MODEL)
    ran = project.deploy(serving, "--keys", str(keys), check=False)
    project.use_model(FIRST_MODEL)
    error = ran.document["error"] if ran.stdout else json.loads(ran.stderr.splitlines()[-1])
    assert error["code"] == "signature-invalid", ran
    assert ran.status == 20
    assert error["message"].startswith("cannot ")
    assert error["remedy"]
    assert (active(serving), main_pid(serving)) == (before, pid)


def test_a_deploy_of_a_project_for_another_board_is_refused_before_anything_is_built(
    serving: Board, project: Reference
) -> None:
    before, pid = active(serving), main_pid(serving)
    ran = project.deploy(serving, "--target", "imx8mp-evk", check=False)
    assert ran.status == 23
    assert json.loads(ran.stderr.splitlines()[-1]) == {
        "code": "wrong-target",
        "message": "cannot deploy for imx8mp-evk to root@board: that board is virtual",
        "remedy": "Leave --target out, or name a board that is imx8mp-evk.",
        "facts": {},
    }
    assert (active(serving), main_pid(serving)) == (before, pid)


def test_a_model_that_fails_its_golden_frame_is_rolled_back(
    serving: Board, project: Reference, viewer: PoseReader, tmp_path: Path
) -> None:
    before = active(serving)
    project.use_model(spoil_model(NEW_MODEL, tmp_path / "bad"))
    ran = project.deploy(serving, check=False)
    project.use_model(FIRST_MODEL)
    error = ran.document["error"]
    assert (ran.status, error["code"]) == (43, "unhealthy"), ran
    assert ran.document["outcome"] == "reverted"
    assert "movenet-lightning 0-spoiled" in error["message"]
    viewer.wait_for(lambda seen: seen.backend == "npu", SERVING_S, since=time.monotonic())
    assert active(serving) == before
    assert project.status(serving)["inference"]["model"]["version"] == "4.0"


def test_a_new_model_arrives_as_a_delta_and_outlives_a_reboot_and_rolls_back(
    serving: Board, project: Reference, viewer: PoseReader
) -> None:
    before = active(serving)
    project.use_model(NEW_MODEL)
    ran = project.deploy(serving)
    document = ran.document
    ways = {move["name"]: move["way"] for move in document["moves"]}
    assert (document["outcome"], document["backend"], ways["pose-model"]) == ("applied", "npu", "delta")
    assert 0 < document["moved_bytes"] < document["image_bytes"] / 10
    viewer.wait_for(lambda seen: seen.backend == "npu", SERVING_S, since=time.monotonic())
    assert active(serving) == document["to_runtime"] != before

    serving.reboot()
    wait_until_serving(serving, SERVING_S)
    status = project.status(serving)
    assert (status["runtime"]["id"], status["previous"]["id"]) == (document["to_runtime"], before)
    assert status["inference"]["model"]["version"] == "4.1"

    project.avocadoctl("-H", "root@board", "rollback", board=serving, timeout_s=200)
    wait_until_serving(serving, SERVING_S)
    assert active(serving) == before
    project.use_model(FIRST_MODEL)


def test_a_power_cut_in_a_trial_boots_the_old_set(serving: Board, project: Reference, tmp_path: Path) -> None:
    before = active(serving)
    project.use_model(spoil_model(NEW_MODEL, tmp_path / "bad"))
    # Not awaited: the power goes while the new set is on trial.
    line = [str(TREE / ".venv/bin/avocadoctl"), "-H", "root@board", "deploy", "-C", str(project.folder)]
    deploying = subprocess.Popen(
        line, env=project.environment(serving), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        wait_for_step(serving, "confirm_health")
        serving.power_cut()
        serving.boot()
        said = deploying.communicate(timeout=120)
    finally:
        deploying.kill()
        project.use_model(FIRST_MODEL)
    assert deploying.returncode == EXIT_STATUS[ErrorCode.POWER_LOST], said
    wait_until_serving(serving, SERVING_S)
    assert active(serving) == before
    status = project.status(serving)
    assert status["change"]["outcome"] == "reverted"
    assert status["problems"] == []


def wait_for_step(board: Board, kind: str, timeout_s: float = 120) -> None:
    """Until the running change has begun that step."""
    deadline = time.monotonic() + timeout_s
    phase = ""
    while time.monotonic() < deadline:
        said = board.exec(["avocadoctl", "-o", "json", "history"], check=False).stdout
        changes = json.loads(said) if said else []
        changes = changes["changes"] if isinstance(changes, dict) else changes
        steps = changes[0]["steps"] if changes and changes[0]["outcome"] == "running" else []
        phase = next((step["phase"] for step in steps if step["kind"] == kind), "")
        if phase == "doing":
            return
    raise AssertionError(f"{kind} did not begin within {timeout_s:g} s; it is {phase or 'not planned'}")

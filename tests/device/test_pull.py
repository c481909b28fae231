"""A board that fetches by itself: a repository behind nginx, the timer's own service, and what it leaves alone."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.cli import main as avocadoctl
from inference.cli import main as avocado_infer
from tests.device.board import TREE, Board
from tests.device.host import find_program
from tests.device.process import holds_within
from tests.device.reference import NEW_MODEL, Reference
from tests.models import spoil_model

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]

PORT = 8090
NGINX = """\
daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 1; user root;
events {{ worker_connections 64; }}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5;
  server {{ listen {address}:{port}; root {root}; gzip on; gzip_types *; }}
}}
"""


@pytest.fixture(scope="module")
def repository(serving: Board, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that nginx serves to the board, which is told its address."""
    program = find_program("nginx", "nginx-light")
    if program is None:
        pytest.skip("nginx is not installed, and could not be: apt-get install nginx-light")
    folder = tmp_path_factory.mktemp("nginx")
    root = folder / "www"
    root.mkdir()
    network = serving.slot.network
    config = folder / "nginx.conf"
    config.write_text(NGINX.format(folder=folder, address=network.workstation_address, port=PORT, root=root))
    within = ["ip", "netns", "exec", network.workstation_namespace]
    server = subprocess.Popen([*within, program, "-c", str(config), "-p", str(folder)], stderr=subprocess.DEVNULL)
    try:
        assert holds_within((folder / "pid").exists, timeout_s=10)
        # The board's /etc is a confext's here: the file comes as an operator's would, below it.
        address = f"http://{network.workstation_address}:{PORT}"
        serving.exec(["mkdir", "-p", "/run/avocado-test"])
        serving.exec(["tee", "/run/avocado-test/update.toml"], input_text=f'repository = "{address}"\n')
        yield root
    finally:
        server.terminate()
        server.wait(10)


def publish(project: Reference, repository: Path) -> None:
    project.avocadoctl("publish", "-C", str(project.folder), "--out", str(repository), timeout_s=600)


def look(board: Board, *options: str) -> subprocess.CompletedProcess[str]:
    """The service, with its sandbox, on the test's address."""
    address = board.exec(["cat", "/run/avocado-test/update.toml"]).stdout.split('"')[1]
    unit = board.exec(["cat", "/usr/lib/systemd/system/avocado-update.service"]).stdout
    section = unit.partition("[Service]")[2]
    properties = [
        f"--property={line}"
        for line in section.splitlines()
        if "=" in line and not line.startswith(("#", "ExecStart", "Type", "TimeoutStart"))
    ]
    words = ["/usr/bin/avocadoctl", "-o", "json", "update", "--url", address, *options]
    return board.exec(
        ["systemd-run", "--wait", "--pipe", "--collect", "--quiet", *properties, *words], timeout_s=240, check=False
    )


def test_the_timer_is_upheld_and_the_service_waits_for_an_address(serving: Board) -> None:
    shown = serving.exec(["systemctl", "show", "-P", "ActiveState", "avocado-update.timer"]).stdout.strip()
    assert shown == "active"
    serving.exec(["systemctl", "start", "avocado-update.service"])
    assert serving.exec(["systemctl", "show", "-P", "ConditionResult", "avocado-update.service"]).stdout == "no\n"
    assert "avocado-update.timer" in serving.exec(["systemctl", "list-timers", "--no-pager"]).stdout


def test_a_new_runtime_is_fetched_and_the_same_one_is_left_alone(
    serving: Board, project: Reference, repository: Path
) -> None:
    project.use_model(NEW_MODEL)
    publish(project, repository)
    done = look(serving, "--check")
    assert json.loads(done.stdout)["wanted"] is True, done.stderr
    done = look(serving)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcome"] == "applied"
    done = look(serving)
    assert (done.returncode, json.loads(done.stdout)["reason"]) == (0, "this board runs it already")


def test_a_runtime_that_was_rolled_back_by_hand_stays_so(serving: Board, project: Reference, repository: Path) -> None:
    serving.ssh(["avocadoctl", "rollback"], timeout_s=120)
    done = look(serving)
    assert done.returncode == 0, done.stderr
    assert "went away from it" in json.loads(done.stdout)["reason"]
    assert json.loads(look(serving, "--again").stdout)["outcome"] == "applied"


def test_a_runtime_that_failed_its_proof_is_tried_once(
    serving: Board, project: Reference, repository: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    spoil_model(NEW_MODEL, bad)
    project.use_model(bad)
    publish(project, repository)
    assert look(serving).returncode != 0
    done = look(serving)
    assert done.returncode == 0, done.stderr
    assert "took it back" in json.loads(done.stdout)["reason"]


def test_a_repository_that_is_down_is_one_message_and_no_change(serving: Board, repository: Path) -> None:
    before = serving.exec(["ls", "/var/lib/avocado/changes"]).stdout
    away = repository.with_name("away")
    repository.rename(away)
    try:
        done = look(serving)
    finally:
        away.rename(repository)
    assert done.returncode != 0
    assert json.loads(done.stderr.strip().splitlines()[-1])["code"] == "repository-incomplete"
    assert serving.exec(["ls", "/var/lib/avocado/changes"]).stdout == before


# A whole runtime for another processor is built, and its wheels are fetched.
@pytest.mark.timeout(900)
def test_a_runtime_for_another_board_is_refused_however_well_it_is_signed(
    serving: Board, project: Reference, repository: Path, tmp_path: Path
) -> None:
    graph, model = TREE / "build/assets/movenet-lightning.json", tmp_path / "movenet-lightning"
    if not graph.exists():
        pytest.skip("no weights and pictures: run `make model`")
    assert avocado_infer(["prepare", str(graph), "--target", "imx93-frdm", "--out", str(model)]) == 0
    project.use_model(model)
    other, away = repository.with_name("other"), repository.with_name("away")
    # Not through the project: its Python is this board's, and the other board has another.
    assert avocadoctl(["publish", "-C", str(project.folder), "--target", "imx93-frdm", "--out", str(other)]) == 0
    before = serving.exec(["readlink", "/var/lib/avocado/active"]).stdout
    repository.rename(away)
    other.rename(repository)
    try:
        done = look(serving)
    finally:
        repository.rename(other)
        away.rename(repository)
    error = json.loads(done.stderr.strip().splitlines()[-1])
    assert (done.returncode, error["code"]) == (23, "wrong-target"), done.stderr
    assert error["message"] == (
        "cannot deploy runtime npu-pose 0.1.0: it is for imx93-frdm (aarch64), this board is virtual "
        f"({platform.machine()})"
    )
    assert serving.exec(["readlink", "/var/lib/avocado/active"]).stdout == before

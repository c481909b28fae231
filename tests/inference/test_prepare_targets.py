"""One project, two boards: nothing but the target line differs, and each runtime holds what its own board loads."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.cli import main as avocadoctl
from agent.contract.errors import OperationError
from agent.host.build import BuiltRuntime, build_runtime
from agent.host.project import Project, load_project
from agent.host.report import Report
from agent.host.stage import MODEL_FOLDER, lay_out
from inference.cli import main as avocado_infer
from inference.model import load_model

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "build" / "assets"
BOARDS = {"virtual": "virtual", "imx93-frdm": "imx93-ethosu"}

# Two sets of wheels are resolved and two runtimes compressed.
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("mkfs.erofs") is None, reason="mkfs.erofs is not installed"),
    pytest.mark.skipif(not (ASSETS / "movenet-lightning.json").exists(), reason="no weights: run `make model`"),
]


@pytest.fixture(scope="module")
def projects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Project]:
    """The same example started for each board, with one model folder for both."""
    folder = tmp_path_factory.mktemp("boards")
    targets = [word for board in BOARDS for word in ("--target", board)]
    model = folder / "movenet-lightning"
    graph = str(ASSETS / "movenet-lightning.json")
    assert avocado_infer(["prepare", graph, *targets, "--out", str(model)]) == 0
    for board in BOARDS:
        assert avocadoctl(["init", "--reference", "npu-pose", "--target", board, str(folder / board)]) == 0
        path = folder / board / "avocado.yaml"
        path.write_text(path.read_text().replace("{{ avocado.home }}/build/models/movenet-lightning", str(model)))
    return {board: load_project(folder / board) for board in BOARDS}


@pytest.fixture(scope="module")
def built(projects: dict[str, Project]) -> dict[str, BuiltRuntime]:
    return {board: build_runtime(project, None, Report(quiet=True)) for board, project in projects.items()}


@pytest.fixture(params=BOARDS)
def board(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def test_nothing_but_the_target_line_differs(projects):
    here, there = ((one.folder / "avocado.yaml").read_text().splitlines() for one in projects.values())
    assert [(a, b) for a, b in zip(here, there, strict=True) if a != b] == [
        ("default_target: virtual", "default_target: imx93-frdm")
    ]
    for name in ("pose.toml", "overlays"):
        first, second = (one.folder / name for one in projects.values())
        assert first.is_dir() or first.read_bytes() == second.read_bytes()


def test_the_model_image_holds_the_files_its_own_board_loads(projects, board, tmp_path):
    project = projects[board]
    lay_out(project, "pose-model", project.document.extensions["pose-model"], tmp_path)
    model = load_model(tmp_path / MODEL_FOLDER)
    assert model.accelerators == tuple(sorted({"cpu", BOARDS[board]}))
    held = {path.name for path in (tmp_path / MODEL_FOLDER).glob("*.tflite")}
    assert held == {model.file_for(name).name for name in model.accelerators}
    assert model.requirements.latency_p95_ms == {"virtual": 100.0, "imx93-frdm": 33.0}[board]


def test_the_npu_image_holds_its_own_boards_profile(projects, board, tmp_path):
    project = projects[board]
    name = f"npu-{board}"
    lay_out(project, name, project.document.extensions[name], tmp_path)
    profile = tomllib.loads((tmp_path / "usr/share/avocado/accelerator.toml").read_text())
    assert profile["name"] == BOARDS[board]
    assert (tmp_path / "usr/lib/avocado/npu/libsimnpu.so").exists() == (board == "virtual")


def test_each_runtime_is_whole_and_names_its_board(built, projects, board):
    manifest = built[board].manifest
    assert (manifest.target, manifest.arch) == (board, projects[board].target.arch)
    assert [one.name for one in manifest.extensions] == [
        "pose-config",
        "pose-model",
        f"npu-{board}",
        "pose-app",
        "avocado-agent",
    ]
    notices = {notice for image in built[board].images for notice in image.notices}
    assert {
        "virtual": "virtual takes 1 of 93 operators of the model in 1 piece, 92 stay on the CPU",
        "imx93-frdm": "imx93-ethosu takes 93 of 93 operators of the model in 1 piece, 0 stay on the CPU",
    }[board] in notices
    assert all(path.stat().st_size > 0 for path in built[board].image_paths.values())


def test_no_image_is_the_same_on_both_processors(built):
    here, there = (set(one.image_paths) for one in built.values())
    assert not here & there


def test_after_install_a_build_finds_everything(built, projects, board, capsys):
    assert avocadoctl(["-o", "json", "install", "-C", str(projects[board].folder)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["target"] == board
    assert sum("packages of device-" in entry["what"] for entry in document["installed"]) == 2


def test_a_board_that_is_not_the_projects_is_refused_by_name(projects):
    project = projects["imx93-frdm"]
    with pytest.raises(OperationError) as caught:
        load_project(project.folder, "imx93-frmd")
    assert caught.value.remedy == "Use imx93-frdm."

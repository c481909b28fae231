"""`avocadoctl install` and `init`: everything a build needs, or all that is missing at once."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.cli import main
from agent.contract.errors import OperationError
from agent.host.bytecode import VARIABLE
from agent.host.image import build_image
from agent.host.install import install
from agent.host.model import keep_only
from agent.host.project import load_project
from agent.host.report import Report
from agent.host.target import known_targets, load_target
from inference.prepare.recipe import RECIPES

PROJECT = """\
default_target: virtual
supported_targets: [virtual, imx93-frdm]
runtimes:
  main: {version: "1.0", extensions: [model, app]}
extensions:
  app: {version: "1.0", files: {usr/share/app/a: a.txt}}
  model: {model: model}
"""


def file_of(name: str) -> dict[str, str]:
    """The entry of a file that holds its own name."""
    return {"path": f"{name}.tflite", "sha256": hashlib.sha256(name.encode()).hexdigest()}


def make_project(folder: Path, accelerators: tuple[str, ...] = ("virtual",)) -> Path:
    (folder / "model").mkdir(parents=True)
    names = ("cpu", *accelerators)
    document = {
        "version": "7",
        "files": {name: file_of("cpu" if name == "virtual" else name) for name in names},
        "golden": {"poses": {name: [] for name in names}, "frame": "golden.npy"},
        "requirements": {"latency_p95_ms": 100.0, "accelerators": {"imx93-ethosu": {"latency_p95_ms": 33.0}}},
    }
    for name in names:
        if name != "virtual":
            (folder / "model" / f"{name}.tflite").write_text(name)
    (folder / "model/model.json").write_text(json.dumps(document))
    (folder / "a.txt").write_text("a\n")
    (folder / "avocado.yaml").write_text(PROJECT)
    return folder


@pytest.fixture(autouse=True)
def _no_other_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    monkeypatch.delenv(VARIABLE, raising=False)


needs_erofs = pytest.mark.skipif(shutil.which("mkfs.erofs") is None, reason="mkfs.erofs is not installed")


@needs_erofs
def test_what_is_ready_is_listed_with_where_it_lies(tmp_path: Path) -> None:
    project = load_project(make_project(tmp_path))
    document = install(project, None, Report(quiet=True))
    assert (document["runtime"], document["target"]) == ("main", "virtual")
    listed = {entry["what"]: entry["path"] for entry in document["installed"]}
    assert listed["model: model 7 for virtual"] == str(project.folder / "model")


@needs_erofs
def test_all_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    folder = make_project(tmp_path)
    (folder / "a.txt").unlink()
    with pytest.raises(OperationError) as caught:
        install(load_project(folder, "imx93-frdm"), None, Report(quiet=True))
    assert caught.value.message == (
        f"cannot build main for imx93-frdm: 2 things are missing: use model {folder}/model: not prepared for "
        f"imx93-ethosu, only for cpu, virtual; build app: {folder}/a.txt does not exist"
    )
    assert caught.value.remedy == (
        "Run `avocado-infer prepare` with --target imx93-ethosu; repeat --target for several boards."
    )


def other_bytes(model: Path) -> None:
    (model / "cpu.tflite").write_text("cut")


def no_file(model: Path) -> None:
    (model / "cpu.tflite").unlink()


def a_link(model: Path) -> None:
    (model / "cpu.tflite").unlink()
    (model / "cpu.tflite").symlink_to("/etc/hostname")


def edit(model: Path, key: str, value: object) -> None:
    document = json.loads((model / "model.json").read_text())
    document[key] = value
    (model / "model.json").write_text(json.dumps(document))


def no_path(model: Path) -> None:
    edit(model, "files", {"cpu": file_of("cpu"), "virtual": {"sha256": "0"}})


def no_path_of_another_board(model: Path) -> None:
    edit(model, "files", {"cpu": file_of("cpu"), "virtual": file_of("cpu"), "imx8mp-vx": {}})


def a_path_out_of_the_folder(model: Path) -> None:
    edit(model, "files", {"cpu": file_of("cpu"), "virtual": {**file_of("cpu"), "path": "../a.txt"}})


def two_digests(model: Path) -> None:
    edit(model, "digests", {"cpu.tflite": "0" * 64})


def a_golden_frame_that_is_missing(model: Path) -> None:
    edit(model, "digests", {"golden.npy": "0" * 64})


CPU_SHA256, CUT_SHA256 = (hashlib.sha256(text).hexdigest() for text in (b"cpu", b"cut"))


@needs_erofs
@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (other_bytes, f"cpu.tflite has sha256 {CUT_SHA256}, model.json says {CPU_SHA256}"),
        (no_file, "cpu.tflite: No such file or directory"),
        (a_link, "cpu.tflite is not a regular file"),
        (no_path, "files.virtual of model.json has no plain file name with a sha256"),
        (no_path_of_another_board, "files.imx8mp-vx of model.json has no plain file name with a sha256"),
        (a_path_out_of_the_folder, "files.virtual of model.json has no plain file name with a sha256"),
        (two_digests, "model.json gives cpu.tflite two different sha256"),
        (a_golden_frame_that_is_missing, "golden.npy: No such file or directory"),
    ],
)
def test_a_model_no_board_could_load_is_neither_installed_nor_built(
    tmp_path: Path, damage: Callable[[Path], None], cause: str
) -> None:
    project = load_project(make_project(tmp_path))
    damage(tmp_path / "model")
    for attempt in (lambda: install(project, None, Report(quiet=True)), lambda: build_image(project, "model")):
        with pytest.raises(OperationError) as caught:
            attempt()
        assert caught.value.message == f"cannot use model {tmp_path / 'model'}: {cause}"
        assert caught.value.remedy == "Prepare the model again."


def test_an_image_keeps_of_a_model_for_several_boards_what_its_own_board_loads(tmp_path: Path) -> None:
    folder = make_project(tmp_path, ("virtual", "imx93-ethosu", "imx8mp-vx")) / "model"
    keep_only(folder, "imx93-ethosu")
    assert sorted(path.name for path in folder.iterdir()) == ["cpu.tflite", "imx93-ethosu.tflite", "model.json"]
    document = json.loads((folder / "model.json").read_text())
    assert sorted(document["files"]) == sorted(document["golden"]["poses"]) == ["cpu", "imx93-ethosu"]
    assert document["requirements"]["latency_p95_ms"] == 33.0


def test_a_model_for_one_board_is_left_byte_for_byte(tmp_path: Path) -> None:
    folder = make_project(tmp_path) / "model"
    before = (folder / "model.json").read_bytes()
    keep_only(folder, "virtual")
    assert (folder / "model.json").read_bytes() == before


def test_init_changes_the_target_line_and_the_runtimes_name_and_nothing_else(tmp_path: Path) -> None:
    for name, words in {"plain": [], "there": ["--target", "imx93-frdm", "-r", "camera"]}.items():
        assert main(["init", "--reference", "npu-pose", *words, str(tmp_path / name)]) == 0
    plain, there = ((tmp_path / name / "avocado.yaml").read_text().splitlines() for name in ("plain", "there"))
    changed = [(old, new) for old, new in zip(plain, there, strict=True) if old != new]
    assert changed == [("default_target: virtual", "default_target: imx93-frdm"), ("  npu-pose:", "  camera:")]


def test_init_refuses_a_board_nobody_knows_before_it_writes_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--target", "imx93-frmd", str(tmp_path / "new")]) != 0
    assert "cannot start a project for 'imx93-frmd': no such target\n  try: Use imx93-frdm." in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_empty_project_for_a_board_can_be_read(tmp_path: Path) -> None:
    assert main(["init", "--target", "imx8mp-evk", "-r", "shop", str(tmp_path)]) == 0
    project = load_project(tmp_path)
    assert (project.target.board, list(project.document.runtimes)) == ("imx8mp-evk", ["shop"])


def test_every_board_has_a_recipe_and_both_halves_name_the_same_accelerator() -> None:
    recipes = {board: name for name, recipe in RECIPES.items() for board in recipe.boards}
    assert recipes == {board: load_target(board).accelerator for board in known_targets()}

"""avocado.yaml: what is accepted, and what each mistake is answered with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.contract.errors import ErrorCode, OperationError
from agent.host.project import HOME, Project, find_project, load_project
from agent.host.target import known_targets, load_target

GOOD = """\
default_target: virtual
supported_targets: [virtual, imx8mp-evk]
runtimes:
  main: {version: "1.0", extensions: [app, "npu-{{ avocado.target.board }}"]}
extensions:
  app: {version: "1.0", files: {usr/share/app/a: a.txt}}
  npu-{{ avocado.target.board }}: {version: "1.0", summary: "{{ avocado.target.accelerator }}"}
  npu-virtual: {version: "2.0"}
"""


def written(tmp_path: Path, text: str = GOOD) -> Path:
    (tmp_path / "avocado.yaml").write_text(text)
    return tmp_path


def refusal(tmp_path: Path, text: str, board: str | None = None) -> OperationError:
    with pytest.raises(OperationError) as caught:
        load_project(written(tmp_path, text), board)
    return caught.value


def test_the_target_line_alone_decides_which_board_it_is_for(tmp_path: Path) -> None:
    here = load_project(written(tmp_path))
    there = load_project(tmp_path, "imx8mp-evk")
    assert here.document.runtimes["main"].extensions == ["app", "npu-virtual"]
    assert there.document.runtimes["main"].extensions == ["app", "npu-imx8mp-evk"]
    assert there.document.extensions["npu-imx8mp-evk"].summary == "imx8mp-vx"


def test_a_definition_that_is_written_out_wins_over_a_templated_one(tmp_path: Path) -> None:
    assert load_project(written(tmp_path)).document.extensions["npu-virtual"].version == "2.0"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("default_target: virtual\n", "", "default_target and supported_targets are missing"),
        ("extensions: [app,", "extension: [app,", "runtimes.main: unknown key 'extension'; did you mean 'extensions'?"),
        ("files:", "flies:", "extensions.app: unknown key 'flies'; did you mean 'files'?"),
        ("  npu-virtual:", "  app:", "line 8: key 'app' stands twice"),
        ("usr/share/app/a", "/usr/share/app/a", None),
        ("usr/share/app/a", "../usr/a", None),
        ("  app: {version: \"1.0\",", "  app: {", "extensions.app: version is missing"),
        ("avocado.target.board", "avocado.target.bord", None),
        ("[app, ", "[ap, ", "runtimes.main: no extension 'ap' is defined; use app"),
        ("[app, ", "[app, app, ", "runtimes.main: an extension is listed twice"),
        ("virtual, imx8mp-evk]", "virtual, imx8mp-evkk]", "supported_targets: no target 'imx8mp-evkk'"),
        ("supported_targets: [virtual, ", "supported_targets: [", None),
        ("  app: {version: \"1.0\", files", "  app: &a {version: \"1.0\", files", "line 8: aliases are not supported"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_where_it_is(tmp_path: Path, old: str, new: str, said: str | None) -> None:
    text = GOOD.replace(old, new)
    assert text != GOOD
    if "&a" in new:
        text = text.replace('{version: "2.0"}', "*a")
    error = refusal(tmp_path, text)
    assert error.message.startswith("cannot ")
    if said is not None:
        assert error.message == f"cannot read {tmp_path / 'avocado.yaml'}: {said}"
        assert error.code is ErrorCode.BAD_PROJECT


def test_a_version_that_is_a_number_is_answered_with_quotes(tmp_path: Path) -> None:
    error = refusal(tmp_path, GOOD.replace('version: "2.0"', "version: 2.0"))
    assert error.remedy == "Put the value in quotes."


# The characters that overlayfs, systemd and shells read as syntax, one name each.
@pytest.mark.parametrize("name", ["a:v2", "a,v2", "a\\v2", "a v2", "a\nv2", "a%i", 'a"q', "aösé", "-a", "../a", "A"])
def test_a_name_that_some_tool_reads_as_syntax_is_refused(tmp_path: Path, name: str) -> None:
    error = refusal(tmp_path, GOOD.replace("  app:", f"  {json.dumps(name)}:"))
    assert error.code is ErrorCode.BAD_PROJECT


@pytest.mark.parametrize("text", ["", "- a", "a: !!python/object/apply:os.system [id]", "a: [", "\x00", "a: \xff"])
def test_what_is_not_a_project_is_refused(tmp_path: Path, text: str) -> None:
    assert refusal(tmp_path, text).code is ErrorCode.BAD_PROJECT


def test_a_board_that_is_not_supported_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    error = refusal(tmp_path, GOOD, "imx8mp-ev")
    assert error.code is ErrorCode.WRONG_TARGET
    assert error.remedy == "Use imx8mp-evk."


def test_the_runtime_is_the_only_one_or_has_to_be_named(tmp_path: Path) -> None:
    project = load_project(written(tmp_path))
    assert project.runtime(None)[0] == "main"
    with pytest.raises(OperationError, match=r"^cannot build runtime 'mian': not defined$") as caught:
        project.runtime("mian")
    assert caught.value.remedy == "Use main."


def test_a_project_is_found_from_a_folder_inside_it(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "deep/er").mkdir(parents=True)
    assert find_project(tmp_path / "deep/er") == tmp_path.resolve()


def test_a_project_may_bring_a_board_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "targets").mkdir()
    own = Path(HOME / "agent/host/targets/imx93-frdm.toml").read_text().replace('"3.12"', '"3.11"')
    (tmp_path / "targets/mine.toml").write_text(own)
    assert load_target("mine", tmp_path).python == "3.11"


@pytest.mark.parametrize("board", sorted(known_targets()))
def test_the_reference_application_reads_for_every_board(board: str) -> None:
    project: Project = load_project(HOME / "examples/npu-pose", board)
    names = project.document.runtimes["npu-pose"].extensions
    assert names == ["pose-config", "pose-model", f"npu-{board}", "pose-app", "avocado-agent"]
    profile = project.document.extensions[f"npu-{board}"].files["usr/share/avocado/accelerator.toml"]
    assert Path(profile).is_file()

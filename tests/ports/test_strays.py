"""Files that somebody left beside images and links: each is told, none is opened, followed or removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.contract.manifest import Manifest
from agent.ports.runtimes import FileRuntimes
from agent.ports.strays import Strays
from tests.change.sets import runtime

R1 = runtime("1")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    made = tmp_path / "state"
    (made / "images").mkdir(parents=True)
    for extension in R1.extensions:
        (made / "images" / f"{extension.image_id}.raw").write_bytes(b"x")
    FileRuntimes(made).stage(R1)
    FileRuntimes(made).activate(R1.id, None)
    return made


def found(state: Path, root: Path | None = None, manifest: Manifest = R1) -> dict[str, str]:
    problems = Strays(state, root).find({manifest.id: manifest})
    assert all(problem.remedy for problem in problems)
    assert len({problem.message for problem in problems}) == len(problems)
    return {problem.remedy.removeprefix("Move ").removesuffix(" elsewhere."): problem.code for problem in problems}


def test_a_state_as_the_agent_made_it_has_no_strays(state: Path) -> None:
    for suffix in ("part", "progress", "progress-new"):  # an interrupted fetch goes on with these
        (state / "images" / f"{R1.extensions[0].image_id}.{suffix}").write_bytes(b"on its way")
    for link in ("98-pose-model.raw", "99-zz-module-index.raw"):
        (state / "runtimes" / R1.id / "sysext" / f".{link}.tmp").symlink_to("../../../images/x.raw")
    assert found(state) == {}


def test_what_systemd_locks_an_image_with_is_no_stray(state: Path) -> None:
    (state / "images" / f".#{R1.extensions[0].image_id}.raw.lck").touch()
    (state / "runtimes" / R1.id / "sysext/.#98-pose-model.raw.lck").touch()
    folder = state / "runtimes" / R1.id / "sysext/.#folder.lck"
    folder.mkdir()
    assert found(state) == {str(folder): "stray-image"}


def test_what_a_mac_a_browser_or_an_editor_leaves_beside_images_is_told_and_stays(state: Path) -> None:
    images = state / "images"
    names = ["._10-pose.raw", "10-pose (1).raw", "10-pose.raw~", "20-web.raw.part", ".DS_Store", "README.txt"]
    for name in names:
        (images / name).write_bytes(b"x")
    (images / "lost+found").mkdir()
    (images / f"{R1.id}.raw").symlink_to("/nowhere")
    expected = {str(images / name): "stray-file" for name in (*names, "lost+found", f"{R1.id}.raw")}
    assert found(state) == expected
    assert all(os.path.lexists(path) for path in expected)


def test_a_file_beside_the_links_is_worse_when_systemd_scans_for_it(state: Path) -> None:
    links = state / "runtimes" / R1.id / "sysext"
    os.mkfifo(links / "._98-pose-model.raw")
    (links / "notes.txt").write_text("x")
    (links / "folder").mkdir()
    assert found(state) == {
        str(links / "._98-pose-model.raw"): "stray-image",
        str(links / "notes.txt"): "stray-file",
        str(links / "folder"): "stray-image",
    }


def test_the_module_index_is_the_agents_own_where_it_is_a_link_to_an_image(state: Path) -> None:
    link = state / "runtimes" / R1.id / "sysext/99-zz-module-index.raw"
    link.symlink_to(f"../../../images/{R1.extensions[0].image_id}.raw")
    assert found(state) == {}
    link.unlink()
    link.symlink_to("/root/x.raw")
    assert found(state) == {str(link): "stray-image"}


def test_a_link_that_was_changed_or_removed_is_told_with_the_command_that_mends_it(state: Path) -> None:
    links = state / "runtimes" / R1.id / "sysext"
    link = links / "98-pose-model.raw"
    target = str(link.readlink())
    for change, why in (
        (lambda: link.symlink_to("/elsewhere.raw"), "was changed: the next boot merges something else"),
        (lambda: None, "is missing: the next boot merges without it"),
    ):
        link.unlink(missing_ok=True)
        change()
        (problem,) = Strays(state, None).find({R1.id: R1})
        assert (problem.code, problem.message) == ("link-changed", f"{link} {why}")
        assert problem.remedy == f"Run: ln -sfn {target} {link}"


def test_the_folders_that_systemd_merges_from_must_lead_to_the_active_runtime(state: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "var/lib/confexts").mkdir(parents=True)
    (root / "var/lib/extensions").symlink_to(state / "active/sysext")
    (root / "run/extensions").mkdir(parents=True)
    (root / "run/extensions/dropped.raw").write_bytes(b"x")
    (root / "run/extensions/readme").write_bytes(b"x")
    problems = {problem.code: problem for problem in Strays(state, root).find({R1.id: R1})}
    assert set(problems) == {"boot-link-changed", "stray-image"}
    assert problems["boot-link-changed"].message == (
        f"{root}/var/lib/confexts does not lead to the active runtime: the next boot merges something else"
    )
    assert problems["stray-image"].remedy == f"Move {root}/run/extensions/dropped.raw elsewhere."

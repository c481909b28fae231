"""The folders of the state have the modes that match the bus policy, also after somebody opened them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from agent.ports import privacy


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_journal_opens_to_the_group_and_images_to_root_alone(tmp_path: Path) -> None:
    (tmp_path / "changes").mkdir(mode=0o755)
    (tmp_path / "images").mkdir(mode=0o777)
    privacy.keep_private(tmp_path)
    assert {name: mode(tmp_path / name) for name in ("changes", "runtimes", "metadata", "images")} == {
        "changes": 0o750,
        "runtimes": 0o750,
        "metadata": 0o750,
        "images": 0o700,
    }


def test_a_link_to_another_disk_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o755)
    state = tmp_path / "state"
    state.mkdir()
    (state / "changes").symlink_to(elsewhere)
    privacy.keep_private(state)
    assert mode(elsewhere) == 0o755


def test_a_file_in_a_folder_s_place_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "changes").touch()
    privacy.keep_private(tmp_path)
    assert caplog.messages == [f"cannot keep {tmp_path / 'changes'} from others: File exists"]
    assert (tmp_path / "images").is_dir()

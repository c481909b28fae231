"""Which files make a unit, as they are in a tree, against those that systemd has read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.ports import rehearsal_child, unit_files

UNIT = "pose.service"
LIB, ETC, RUN = "usr/lib/systemd/system", "etc/systemd/system", "run/systemd/system"


def write(root: Path, path: str, text: str) -> str:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return str(file)


@pytest.fixture
def board(tmp_path: Path) -> Path:
    """What systemd has read here is what `loaded` says."""
    write(tmp_path, f"{LIB}/{UNIT}", "[Service]\nUser=avocado-infer\n")
    write(tmp_path, f"{LIB}/{UNIT}.d/10-a.conf", "[Service]\nNice=1\n")
    write(tmp_path, f"{ETC}/service.d/20-all.conf", "[Service]\nNice=2\n")
    return tmp_path


def loaded(root: Path) -> dict[str, str]:
    drop_ins = [str(root / LIB / f"{UNIT}.d/10-a.conf"), str(root / ETC / "service.d/20-all.conf")]
    return unit_files.contents(str(root / LIB / UNIT), drop_ins)


def test_what_systemd_has_read_is_what_it_would_read_again(board: Path) -> None:
    assert unit_files.to_be_read(UNIT, str(board)) == loaded(board)
    assert set(loaded(board)) == {"", "10-a.conf", "20-all.conf"}


@pytest.mark.parametrize(
    "path",
    [
        f"{LIB}/{UNIT}",
        f"{ETC}/{UNIT}",
        f"{LIB}/{UNIT}.d/10-a.conf",
        f"{LIB}/{UNIT}.d/10-vendor.conf",
        f"{LIB}/service.d/30-vendor.conf",
        f"{ETC}/{UNIT}.d/10-a.conf",
        f"{RUN}/{UNIT}.d/20-all.conf",
        f"usr/local/lib/systemd/system/{UNIT}.d/10-a.conf",
        f"run/systemd/generator/{UNIT}.d/50-generated.conf",
    ],
)
def test_a_file_that_says_something_else_is_seen(board: Path, path: str) -> None:
    before = loaded(board)
    write(board, path, "[Service]\nEnvironment=LD_LIBRARY_PATH=/usr/lib/vendor\n")
    assert unit_files.to_be_read(UNIT, str(board)) != before


@pytest.mark.parametrize(
    "path",
    [
        f"{LIB}/service.d/20-all.conf",
        "usr/local/lib/systemd/system/service.d/20-all.conf",
        f"{LIB}/{UNIT}.d/README",
        f"{LIB}/other.service.d/10-a.conf",
    ],
)
def test_a_file_that_systemd_would_not_read_is_not(board: Path, path: str) -> None:
    before = loaded(board)
    write(board, path, "[Service]\nNice=9\n")
    assert unit_files.to_be_read(UNIT, str(board)) == before


def test_the_same_words_in_another_folder_are_the_same_unit(board: Path) -> None:
    before = loaded(board)
    write(board, f"{ETC}/{UNIT}", "[Service]\nUser=avocado-infer\n")
    assert unit_files.to_be_read(UNIT, str(board)) == before


def test_a_drop_in_that_is_taken_away_is_seen_and_an_empty_one_says_nothing(board: Path) -> None:
    before = loaded(board)
    write(board, f"{ETC}/{UNIT}.d/99-empty.conf", "")
    assert unit_files.to_be_read(UNIT, str(board)) == before
    (board / LIB / f"{UNIT}.d/10-a.conf").unlink()
    assert unit_files.to_be_read(UNIT, str(board)) != before
    assert unit_files.to_be_read("none.service", str(board / "nowhere")) == {}


def test_a_set_is_not_judged_by_another_set_s_unit(board: Path) -> None:
    request: dict[str, Any] = {"unit": UNIT, "unit_files": loaded(board)}
    assert rehearsal_child.stale(request, str(board)) is None
    write(board, f"{LIB}/{UNIT}.d/10-vendor.conf", "[Service]\nEnvironment=LD_LIBRARY_PATH=/usr/lib/vendor\n")
    assert rehearsal_child.stale(request, str(board)) == {
        "skipped": "the set changes pose.service itself, which systemd has not read yet"
    }

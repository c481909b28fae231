"""`avocadoctl delta`: on any pair of files, with an output that is whole and inputs that stay as they are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from agent import cli
from agent.contract.errors import EXIT_STATUS, ErrorCode
from agent.delta.output import whole_file

OLD, NEW = b"a line of the base\n" * 5000, b"a line of the base\n" * 4000 + b"and another one\n" * 900


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "old").write_bytes(OLD)
    (tmp_path / "new").write_bytes(NEW)
    return tmp_path


def delta(capsys: pytest.CaptureFixture[str], *words: str | Path, status: int = 0) -> dict[str, Any]:
    """The document of `-o json`; the error's when a status is expected."""
    assert cli.main(["-o", "json", "delta", *map(str, words)]) == status
    said = capsys.readouterr()
    found: dict[str, Any] = json.loads(said.err if status else said.out)
    return found


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_create_info_and_apply_agree(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = delta(capsys, "create", folder / "old", folder / "new", folder / "d")
    told = delta(capsys, "info", folder / "d")
    applied = delta(capsys, "apply", folder / "old", folder / "d", folder / "out")
    assert (folder / "out").read_bytes() == NEW
    assert made["delta_size_bytes"] == told["delta_size_bytes"] == (folder / "d").stat().st_size < 200
    assert made["result_sha256"] == told["result_sha256"] == applied["result_sha256"]
    assert sum(share["result_bytes"] for share in told["operations"].values()) == len(NEW)
    assert files(folder) == ["d", "new", "old", "out"]


def test_a_file_beside_the_output_is_never_written_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "old").rename(folder / "d.part")
    (folder / "new").rename(folder / "out.part")
    delta(capsys, "create", folder / "d.part", folder / "out.part", folder / "d")
    delta(capsys, "apply", folder / "d.part", folder / "d", folder / "out")
    assert ((folder / "d.part").read_bytes(), (folder / "out.part").read_bytes()) == (OLD, NEW)
    assert (folder / "out").read_bytes() == NEW


def test_two_that_write_the_same_file_do_not_meet(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with whole_file(out) as one, whole_file(out) as other:
        one.write_bytes(b"one")
        other.write_bytes(b"other")
    assert out.read_bytes() == b"one"  # it ended last
    assert files(tmp_path) == ["out"]


def test_the_output_is_on_disk_before_it_has_its_name_and_the_name_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    rename, fsync = Path.replace, os.fsync

    def watched_fsync(descriptor: int) -> None:
        order.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().suffix or 'folder'}")
        fsync(descriptor)

    def watched_replace(path: Path, target: Path) -> Path:
        order.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    folder = tmp_path / "folder"
    folder.mkdir()
    with whole_file(folder / "out") as part:
        part.write_bytes(b"bytes")
    assert order == ["sync .part", "rename", "sync folder"]


@pytest.mark.parametrize(
    ("verb", "read", "out"),
    [
        ("create", ("old", "new"), "old"),
        ("create", ("old", "new"), "new"),
        ("create", ("old", "new"), "link"),
        ("apply", ("old", "d"), "old"),
        ("apply", ("old", "d"), "d"),
        ("apply", ("old", "d"), "link"),
    ],
)
def test_an_output_that_is_an_input_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], verb: str, read: tuple[str, str], out: str
) -> None:
    delta(capsys, "create", folder / "old", folder / "new", folder / "d")
    (folder / "link").hardlink_to(folder / "old")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    error = delta(capsys, verb, *(folder / name for name in read), folder / out, status=EXIT_STATUS[ErrorCode.USAGE])
    found = folder / ("old" if out == "link" else out)
    assert error["message"] == f"cannot write {folder / out}: it is {found}, which is read for it"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("out", "code", "says", "remedy"),
    [
        ("pipe", ErrorCode.USAGE, "it is not a file", "Name a new file, or one to replace."),
        (".", ErrorCode.USAGE, "it is not a file", "Name a new file, or one to replace."),
        ("gone/out", ErrorCode.NOT_FOUND, "there is no folder {folder}/gone", "Make it first: mkdir -p {folder}/gone"),
    ],
)
def test_an_output_that_cannot_be_a_file_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], out: str, code: ErrorCode, says: str, remedy: str
) -> None:
    os.mkfifo(folder / "pipe")
    error = delta(capsys, "create", folder / "old", folder / "new", folder / out, status=EXIT_STATUS[code])
    assert error["message"] == f"cannot write {folder / out}: {says.format(folder=folder)}"
    assert error["remedy"] == remedy.format(folder=folder)
    assert (folder / "pipe").is_fifo()


def test_a_refused_delta_leaves_the_output_as_it_was(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "out").write_bytes(b"as it was")
    (folder / "d").write_bytes(b"no delta at all" * 100)
    error = delta(
        capsys, "apply", folder / "old", folder / "d", folder / "out", status=EXIT_STATUS[ErrorCode.DELTA_INVALID]
    )
    assert error["message"] == "cannot apply the delta: it does not begin as a delta does"
    assert (folder / "out").read_bytes() == b"as it was"
    assert files(folder) == ["d", "new", "old", "out"]


def test_the_output_s_mode_is_what_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with whole_file(tmp_path / "out"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o640

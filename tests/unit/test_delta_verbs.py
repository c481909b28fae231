"""`avocadoctl delta`: on any pair of files, with an output that is whole and inputs that stay as they are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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
    assert error["message"] == f"cannot apply {folder / 'd'}: it does not begin as a delta does"
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


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data[:-1], "it is cut short"),
        (lambda data: data + b"!", "bytes follow its end"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "its checksum does not match its bytes"),
    ],
)
def test_what_apply_refuses_info_refuses_and_both_name_the_file(
    folder: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[bytes], bytes], why: str
) -> None:
    delta(capsys, "create", folder / "old", folder / "new", folder / "d")
    (folder / "d").write_bytes(damage((folder / "d").read_bytes()))
    status = EXIT_STATUS[ErrorCode.DELTA_INVALID]
    said = [
        delta(capsys, "info", folder / "d", status=status)["message"],
        delta(capsys, "apply", folder / "old", folder / "d", folder / "out", status=status)["message"],
    ]
    assert said == [f"cannot read {folder / 'd'}: {why}", f"cannot apply {folder / 'd'}: {why}"]


def test_a_file_that_says_a_false_size_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    length = len(Path("/proc/version").read_bytes())
    for pair in ((folder / "old", "/proc/version"), ("/proc/version", folder / "new")):
        error = delta(capsys, "create", *pair, folder / "d", status=EXIT_STATUS[ErrorCode.USAGE])
        assert error["message"] == f"cannot read /proc/version: its size is 0 bytes, and {length} were read"
        assert error["remedy"] == "Copy it first, and name the copy."
    assert files(folder) == ["new", "old"]


def test_an_input_that_does_not_read_is_not_taken_for_an_output(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unreadable = "/proc/self/mem"  # address 0 is nobody's
    says = f"cannot read {unreadable}: Input/output error"
    words: list[tuple[str | Path, ...]] = [
        ("create", folder / "old", unreadable, folder / "out"),
        ("apply", folder / "old", unreadable, folder / "out"),
        ("info", unreadable),
    ]
    for line in words:
        assert delta(capsys, *line, status=EXIT_STATUS[ErrorCode.INTERNAL])["message"] == says
    assert files(folder) == ["new", "old"]


def test_a_name_that_is_too_long_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / ("x" * 300)
    error = delta(capsys, "create", folder / "old", folder / "new", out, status=EXIT_STATUS[ErrorCode.USAGE])
    assert (error["message"], error["remedy"]) == (f"cannot write {out}: File name too long", "Give it a shorter name.")
    error = delta(capsys, "info", out, status=EXIT_STATUS[ErrorCode.NOT_FOUND])
    assert error["message"] == f"cannot read {out}: it is not a readable file"


def test_the_longest_name_there_is_can_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    delta(capsys, "create", folder / "old", folder / "new", folder / ("\u00e9" * 127))


def test_a_folder_that_may_not_be_written_to_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("agent.delta.output.os.open", refuse)  # root may write everywhere
    error = delta(
        capsys, "create", folder / "old", folder / "new", folder / "d", status=EXIT_STATUS[ErrorCode.NOT_PERMITTED]
    )
    assert error["message"] == f"cannot write {folder / 'd'}: Permission denied"
    assert error["remedy"] == "Name a file in a folder that you may write to."


def test_a_success_that_nobody_can_read_is_none(folder: Path) -> None:
    line = [sys.executable, "-m", "agent.cli", "delta", "create", *(str(folder / name) for name in ("old", "new", "d"))]
    with Path("/dev/full").open("w") as full:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=50, env=env)
    assert done.returncode == EXIT_STATUS[ErrorCode.NO_SPACE]
    assert done.stderr == (
        "avocadoctl: cannot write to standard output: No space left on device\n"
        "  try: Send it somewhere else; the rest is done.\n"
    )


def test_who_is_ended_at_the_instant_the_file_is_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = os.open

    def then_end(path: Path, flags: int, mode: int) -> int:
        os.close(really_open(path, flags, mode))
        sys.exit(143)  # as the handler of SIGTERM does

    monkeypatch.setattr("agent.delta.output.os.open", then_end)
    with pytest.raises(SystemExit), whole_file(tmp_path / "out"):
        raise AssertionError("nothing is written any more")
    assert files(tmp_path) == []


def test_what_is_ended_leaves_nothing_and_what_is_killed_says_what_it_was(tmp_path: Path) -> None:
    (tmp_path / "new").write_bytes(b"".join(b"%x\n" % (n * n) for n in range(2_000_000)))
    line = [sys.executable, "-m", "agent.cli", "delta", "create", "-", str(tmp_path / "new"), str(tmp_path / "d")]
    for number, left in ((signal.SIGTERM, 0), (signal.SIGKILL, 1)):
        process = subprocess.Popen(line)
        begun = time.monotonic()
        while not list(tmp_path.glob(".d.*.part")) and time.monotonic() < begun + 20:
            time.sleep(0.01)
        process.send_signal(number)
        process.wait(40)
        assert len(list(tmp_path.glob(".d.*.part"))) == left
    assert not (tmp_path / "d").exists()

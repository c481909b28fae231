"""What the other device tests build on: the virtual board boots, is reached, loses power, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.device import slots
from tests.device.board import TREE, Board
from tests.device.disk import Disk, make_template
from tests.device.host import mounts_below
from tests.device.process import BoardError
from tests.device.rootfs import board_python, tarball

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("boards_made")]


def test_it_runs_a_whole_systemd_with_no_failed_unit(board: Board) -> None:
    assert board.exec(["systemctl", "is-system-running"]).stdout == "running\n"
    assert board.exec(["systemctl", "--version"]).stdout.startswith("systemd 257 ")
    assert board.exec(["hostname"]).stdout.strip() == board.name


def test_a_program_gets_its_input_and_its_status_comes_back(board: Board) -> None:
    assert board.exec(["cat"], input_text="over\n").stdout == "over\n"
    assert board.ssh(["cat"], input_text="over ssh\n").stdout == "over ssh\n"
    assert board.exec(["sh", "-c", "exit 7"], check=False).returncode == 7
    assert board.ssh(["sh", "-c", "exit 7"], check=False).returncode == 7
    with pytest.raises(
        BoardError, match=r"^cannot run `false` on the board: \S+ ended with status 1: it said nothing$"
    ):
        board.ssh("false")


def test_ssh_reaches_root_and_a_user_without_rights(board: Board) -> None:
    assert board.ssh(["id", "--user", "--name"]).stdout == "root\n"
    assert board.ssh(["id", "--user", "--name"], user="oper").stdout == "oper\n"
    assert board.ssh(["cat", "/etc/shadow"], user="oper", check=False).returncode == 1


def test_a_program_that_runs_plain_ssh_reaches_the_board_through_path(board: Board) -> None:
    path = f"{board.access.programs}:{os.environ['PATH']}"
    line = ["sh", "-c", "ssh root@board hostname"]
    answer = subprocess.run(
        line, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=20, check=True
    )
    assert answer.stdout.strip() == board.name


def test_a_folder_is_copied_to_the_board(board: Board, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_text("here\n")
    board.put(tmp_path / "folder", "/var/tmp")
    assert board.exec(["cat", "/var/tmp/folder/file"]).stdout == "here\n"


def test_a_port_of_the_board_opens_on_the_host(board: Board) -> None:
    board.exec(["sh", "-c", "mkdir -p /srv/page; echo a page >/srv/page/index.html"])
    serve = ["systemd-run", "--quiet", "--unit=page", "python3", "-m", "http.server", "-d", "/srv/page"]
    board.exec([*serve, "--bind", "127.0.0.1", "8000"])
    listening = ["sh", "-c", "until ss -Hltn sport = :8000 | grep -q .; do sleep 0.05; done"]
    board.exec(listening, timeout_s=10)
    with board.forward(8000) as way:
        for _ in range(3):
            with urllib.request.urlopen(way.url, timeout=10) as page:
                assert page.read() == b"a page\n"
    board.exec(["systemctl", "stop", "page"])


def test_its_devices_are_its_own(board: Board) -> None:
    host = Path("/dev/loop-control").stat()
    assert board.exec(["stat", "-c", "%t:%T %a %G", "/dev/simnpu0"]).stdout == "1:3 660 video\n"
    board.exec(["chmod", "600", "/dev/loop-control"])
    assert Path("/dev/loop-control").stat().st_mode == host.st_mode


def test_an_extension_image_merges(board: Board) -> None:
    script = """
        mkdir -p /tmp/x/usr/lib/extension-release.d /var/lib/extensions
        echo it is merged >/tmp/x/usr/lib/merged
        grep -E "^(ID|VERSION_ID)=" /etc/os-release >/tmp/x/usr/lib/extension-release.d/extension-release.x
        mkfs.erofs --quiet /var/lib/extensions/x.raw /tmp/x
        systemd-sysext merge && cat /usr/lib/merged && systemd-sysext unmerge && rm /var/lib/extensions/x.raw
    """
    assert board.exec(["sh", "-ec", script]).stdout.endswith("it is merged\n")


def test_it_reboots(board: Board) -> None:
    before = board.exec(["cat", "/proc/sys/kernel/random/boot_id", "/etc/machine-id"]).stdout.split()
    assert board.reboot() == "running"
    after = board.exec(["cat", "/proc/sys/kernel/random/boot_id", "/etc/machine-id"]).stdout.split()
    journal = board.exec(["journalctl", "--list-boots", "--no-pager", "--quiet"]).stdout.splitlines()
    assert before[0] != after[0]
    assert before[1] == after[1]
    assert len(journal) == 2


def test_two_boards_run_at_once_share_no_name_and_either_can_go_first(
    board: Board, new_board: Callable[[], Board]
) -> None:
    other = new_board()
    assert other.boot() == "running"
    assert board.reboot() == "running"  # so that this one started while the other one's disk was mounted
    assert board.ssh(["hostname"]).stdout.strip() == board.name
    assert other.ssh(["hostname"]).stdout.strip() == other.name
    names = [
        {place.slot.network.board_namespace, place.slot.network.board_address, place.slot.groups.name, str(place.log)}
        for place in (board, other)
    ]
    assert names[0].isdisjoint(names[1])
    other.destroy()
    assert other.traces() == []
    assert board.ssh(["hostname"]).stdout.strip() == board.name


def test_a_power_cut_keeps_what_was_synced_and_loses_what_was_not(board: Board) -> None:
    board.exec(["sh", "-c", "echo kept >/root/synced; sync /root/synced /root; echo lost >/root/unsynced"])
    board.power_cut()
    assert not board.is_running()
    assert board.boot() == "running"
    assert board.exec(["cat", "/root/synced"]).stdout == "kept\n"
    assert board.exec(["cat", "/root/unsynced"], check=False).stdout == ""


def test_what_is_provisioned_is_there_at_boot_and_survives_a_power_cut_at_once(new_board: Callable[[], Board]) -> None:
    board = new_board()
    board.provision(lambda root: (root / "etc/provisioned").write_text("before the boot\n"))
    board.boot()
    with pytest.raises(BoardError, match="it is running"):
        board.provision(lambda root: None)
    board.power_cut()
    board.boot()
    assert board.ssh(["cat", "/etc/provisioned"]).stdout == "before the boot\n"
    board.destroy()


def test_an_init_that_ends_is_a_failed_boot_that_says_so(new_board: Callable[[], Board]) -> None:
    board = new_board()
    _replace_init(board, "echo this init gives up; exit 3")
    with pytest.raises(BoardError) as failure:
        board.boot()
    assert str(failure.value).startswith(f"cannot boot board {board.name}: systemd-nspawn ended with status 3\n")
    assert "the end of its console:\nthis init gives up" in str(failure.value)
    board.destroy()


def test_an_init_that_hangs_is_a_failed_boot_within_its_limit(new_board: Callable[[], Board]) -> None:
    board = new_board()
    _replace_init(board, "echo this init hangs; exec sleep 1000")
    began = time.monotonic()
    with pytest.raises(BoardError, match=r"not up within 2 s \(offline\)\n---.*:\nthis init hangs$"):
        board.boot(timeout_s=2)
    assert time.monotonic() - began < 10
    assert not board.is_running()
    board.destroy()


def test_a_destroyed_board_leaves_the_host_as_it_was(new_board: Callable[[], Board]) -> None:
    board = new_board()
    board.boot()
    way = board.forward(22)
    assert {trace.split()[0] for trace in board.traces()} == {
        "process",
        "control",
        "network",
        "mount",
        "loop",
        "folder",
    }
    board.destroy()
    assert board.traces() == []
    # Once more in the words of the system's own tools.
    for line in (["mount"], ["losetup", "--all"], ["ip", "netns", "list"], ["find", "/sys/fs/cgroup", "-name", "avb*"]):
        listing = subprocess.run(line, capture_output=True, text=True, timeout=20, check=True).stdout
        assert f"{slots.WORK}/{board.slot.number}/" not in listing
        assert not re.search(rf"\bavb{board.slot.number}(ws)?\b", listing)
    assert not board.access.folder.exists()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(way.url, timeout=5)


def test_a_killed_run_is_cleared_away_by_the_next_board(new_board: Callable[[], Board]) -> None:
    program = f"""
import sys
from tests.device.board import Board
board = Board.create("killed-{os.getpid()}")
board.boot()
print(board.slot.number, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=TREE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        number = int(run.stdout.readline())
        run.send_signal(signal.SIGKILL)
    abandoned = Board(f"killed-{os.getpid()}", slots.Slot(number))
    assert abandoned.is_running(), "the board outlives its process"
    new_board().destroy()
    assert abandoned.traces() == []
    assert Board.find(abandoned.name) is None
    assert not abandoned.access.folder.exists()


def test_a_prepared_disk_is_made_from_the_tarball_and_nothing_stays_mounted(tmp_path: Path) -> None:
    work = tmp_path / "work"
    make_template(tarball(), tmp_path / "disk.pool", work)
    assert mounts_below(work) == []
    assert Disk(work).loop_devices() == []
    made = (tmp_path / "disk.pool").stat()
    assert made.st_blocks * 512 < 600e6 < made.st_size, "it is sparse"


def test_the_boards_python_compiles_bytecode_on_the_host(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("answer = 42\n")
    compiling = [
        "-I",
        "-m",
        "compileall",
        "-q",
        "--invalidation-mode",
        "unchecked-hash",
        "-s",
        str(tmp_path),
        str(tmp_path),
    ]
    subprocess.run([board_python(), *compiling], check=True, timeout=60)
    bytecode = (tmp_path / "__pycache__/module.cpython-313.pyc").read_bytes()
    magic_of_3_13, unchecked_hash = 3571, 1
    assert int.from_bytes(bytecode[:2], "little") == magic_of_3_13
    assert int.from_bytes(bytecode[4:8], "little") == unchecked_hash
    assert importlib.util.MAGIC_NUMBER[2:] == bytecode[2:4]


def _replace_init(board: Board, script: str) -> None:
    def write(root: Path) -> None:
        init = root / "usr/lib/systemd/systemd"
        init.unlink()
        init.write_text(f"#!/bin/sh\n{script}\n")
        init.chmod(0o755)

    board.provision(write)

"""What a change does on the booted board beside the reference deploy: to other services, to kernel modules."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.device.board import Board
from tests.device.process import holds_within
from tests.device.reference import BOARD, FIRST_MODEL, NEW_MODEL, Reference, wait_until_serving

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]

SERVING_S = 60.0
KERNEL = "6.6.1-board"
UNIT = """\
[Unit]
After=pose.service
[Service]
ExecStart=/usr/bin/python3 -I /run/map.py {path}
"""
PROGRAM = """\
import mmap, sys, time
with open(sys.argv[1], "rb") as file:
    held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
time.sleep(1e6)
"""


@pytest.fixture(scope="module")
def serving(new_board: Callable[[], Board], project: Reference) -> Board:
    board = new_board()
    if shutil.which("objcopy"):
        board.provision(lambda root: module(root / f"usr/lib/modules/{KERNEL}/kernel/fs/base.ko"))
        board.provision(lambda root: subprocess.run(["chroot", root, "depmod", KERNEL], check=True, timeout=60))
    project.provision(board)
    board.boot()
    wait_until_serving(board, SERVING_S)
    return board


def write(board: Board, path: str, text: str) -> None:
    board.exec(["python3", "-I", "-c", "import sys; open(sys.argv[1], 'w').write(sys.argv[2])", path, text])


def shown(board: Board, unit: str, name: str) -> str:
    return board.exec(["systemctl", "show", "--value", "-p", name, unit]).stdout.strip()


def test_a_service_that_maps_the_model_restarts_with_it_and_one_that_does_not_goes_on(
    serving: Board, project: Reference
) -> None:
    model = serving.exec(["find", "/usr/share/avocado", "-name", "*.tflite"]).stdout.split()[0]
    # Units of the base, in a folder that no merge covers.
    write(serving, "/run/map.py", PROGRAM)
    write(serving, "/run/systemd/system/viewer.service", UNIT.format(path=model))
    write(serving, "/run/systemd/system/other.service", UNIT.format(path="/usr/lib/avocado/npu/libsimnpu.so"))
    serving.exec(["systemctl", "daemon-reload"])
    serving.exec(["systemctl", "start", "viewer.service", "other.service"])
    # Nobody could start this one again.
    serving.exec(["systemd-run", "--unit=passing.service", "python3", "-I", "/run/map.py", model])
    units = ("viewer.service", "other.service", "passing.service")
    before = {unit: shown(serving, unit, "MainPID") for unit in units}
    project.use_model(NEW_MODEL)
    try:
        planned = project.deploy(serving, "--dry-run").document
        stops = next(step for step in planned["change"]["facts"]["plan"] if step["kind"] == "stop_services")
        assert stops["inputs"]["units"] == ["pose.service", "viewer.service"]
        assert {unit: shown(serving, unit, "MainPID") for unit in units} == before
        assert "warm_up" not in {step["kind"] for step in planned["change"]["facts"]["plan"]}
        document = project.deploy(serving, "--warm-up").document
    finally:
        project.use_model(FIRST_MODEL)
    assert document["outcome"] == "applied", document
    # The virtual NPU grants one context, and that is the serving model's.
    warm_up = next(step for step in document["change"]["steps"] if step["kind"] == "warm_up")
    assert warm_up["warning"] == "not tried on the NPU: it grants one context"
    assert document["change"]["facts"]["warm_up"]["backend"] == "cpu"
    after = {unit: shown(serving, unit, "MainPID") for unit in units}
    assert {unit for unit in units if after[unit] != before[unit]} == {"viewer.service"}
    assert shown(serving, "viewer.service", "ActiveState") == "active"
    pose, viewer = (
        int(shown(serving, unit, "ActiveEnterTimestampMonotonic")) for unit in ("pose.service", "viewer.service")
    )
    assert pose <= viewer

    serving.exec(["systemctl", "stop", *units])
    project.avocadoctl("-H", BOARD, "rollback", board=serving, timeout_s=200)
    assert shown(serving, "viewer.service", "ActiveState") == "inactive"
    wait_until_serving(serving, SERVING_S)


def test_what_ends_by_itself_and_what_is_masked_keep_no_change_back(serving: Board, project: Reference) -> None:
    model = serving.exec(["find", "/usr/share/avocado", "-name", "*.tflite"]).stdout.split()[0]
    once = f"/bin/sh -c 'test -e /run/ran || {{ touch /run/ran; exec /usr/bin/python3 -I /run/map.py {model}; }}'"
    write(serving, "/run/map.py", PROGRAM)
    write(serving, "/run/systemd/system/batch.service", f"[Service]\nExecStart={once}\n")
    write(serving, "/run/systemd/system/job.service", f"{UNIT.format(path=model)}Type=oneshot\n")
    serving.exec(["systemctl", "daemon-reload"])
    serving.exec(["systemctl", "start", "--no-block", "batch.service", "job.service"])
    assert holds_within(lambda: all(maps(serving, unit, model) for unit in ("batch.service", "job.service")), 20)
    job = shown(serving, "job.service", "MainPID")
    line = ("-H", BOARD, "-o", "json", "rollback")
    try:
        document = project.avocadoctl(*line, board=serving, timeout_s=200).document
        assert document["outcome"] == "applied"
        assert shown(serving, "job.service", "MainPID") == job
        assert shown(serving, "batch.service", "ActiveState") == "inactive"
        stop = next(step for step in document["steps"] if step["kind"] == "stop_services")
        assert stop["inputs"]["bystanders"] == ["batch.service"]
        assert stop["warning"].startswith("job.service runs from an image that leaves")

        serving.exec(["systemctl", "mask", "--runtime", "pose.service"])
        document = project.avocadoctl(*line, board=serving, timeout_s=200).document
        assert document["outcome"] == "applied"
        assert shown(serving, "pose.service", "ActiveState") == "inactive"
    finally:
        serving.exec(["systemctl", "stop", "job.service"])
        serving.exec(["systemctl", "unmask", "--runtime", "pose.service"])
        serving.exec(["systemctl", "start", "pose.service"])
    wait_until_serving(serving, SERVING_S)


def maps(board: Board, unit: str, path: str) -> bool:
    found = board.exec(["cat", f"/proc/{shown(board, unit, 'MainPID')}/maps"], check=False)
    return Path(path).name in found.stdout


def test_a_board_whose_pose_service_hangs_says_so_and_rolls_back(serving: Board, project: Reference) -> None:
    assert project.status(serving)["previous"] is not None
    serving.exec(["systemctl", "freeze", "pose.service"])
    assert holds_within(lambda: problems(serving, project) == ["inference-silent"], 20)
    ran = project.avocadoctl("-H", BOARD, "-o", "json", "rollback", board=serving, timeout_s=200)
    assert ran.document["outcome"] == "applied"
    release = next(step for step in ran.document["steps"] if step["kind"] == "release_npu")
    assert "pose.service does not answer on the bus" in release["warning"]
    wait_until_serving(serving, SERVING_S)
    assert holds_within(lambda: problems(serving, project) == [], 20)


def problems(board: Board, project: Reference) -> list[str]:
    return [problem["code"] for problem in project.status(board)["problems"]]


def module(path: Path) -> None:
    """The smallest file that depmod and modprobe take for a kernel module."""
    path.parent.mkdir(parents=True, exist_ok=True)
    info = path.with_suffix(".info")
    info.write_bytes(b"license=GPL\0")
    machine = {"x86_64": "elf64-x86-64", "aarch64": "elf64-littleaarch64"}[os.uname().machine]
    line = ["objcopy", "-I", "binary", "-O", machine, "--rename-section", ".data=.modinfo", info, path]
    subprocess.run(line, check=True, timeout=20)
    info.unlink()


@contextlib.contextmanager
def with_extensions(project: Reference, trees: Mapping[str, Path], more_keys: str = "") -> Iterator[None]:
    """The project with more extensions, over the others, that hold these trees."""
    path = project.folder / "avocado.yaml"
    good = path.read_text(encoding="utf-8")
    parts = [f'{name}:\n  version: "1"\n  overlay: "{tree}"\n{more_keys}' for name, tree in trees.items()]
    listed = "".join(f"      - {name}\n" for name in trees)
    more = good.replace("      - pose-config\n", f"{listed}      - pose-config\n", 1)
    more = more.replace("\nextensions:\n", f"\nextensions:\n{textwrap.indent(''.join(parts), '  ')}\n", 1)
    path.write_text(more, encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(good, encoding="utf-8")


def found(board: Board) -> set[str]:
    """Which modules modprobe finds."""
    names = ("base", "npu", "cam")
    said = {name: board.exec(["modprobe", "-S", KERNEL, "--show-depends", name], check=False) for name in names}
    return {name for name, ran in said.items() if ran.returncode == 0 and f"/{name}.ko" in ran.stdout}


@pytest.mark.skipif(shutil.which("objcopy") is None, reason="objcopy is not installed: apt-get install binutils")
def test_modules_of_every_extension_and_of_the_base_are_found_whatever_index_each_brings(
    serving: Board, project: Reference, tmp_path: Path
) -> None:
    trees = {name: tmp_path / name for name in ("npu", "cam")}
    for name, tree in trees.items():
        folder = tree / f"usr/lib/modules/{KERNEL}"
        module(folder / f"extra/{name}.ko")
        # As distributions make them: an index that knows of nothing else.
        (folder / "modules.dep").write_text(f"extra/{name}.ko:\n")
        (folder / "modules.dep.bin").write_bytes(b"not even an index")
    assert found(serving) == {"base"}
    with with_extensions(project, trees):
        assert project.deploy(serving).document["outcome"] == "applied"
    assert found(serving) == {"base", "npu", "cam"}
    assert project.status(serving)["problems"] == []
    serving.reboot()
    wait_until_serving(serving, SERVING_S)
    assert found(serving) == {"base", "npu", "cam"}
    status = project.status(serving)
    assert status["problems"] == []
    assert "zz-module-index" not in {row["name"] for row in status["extensions"]}

    project.avocadoctl("-H", BOARD, "ext", "disable", "cam", board=serving, timeout_s=200)
    assert found(serving) == {"base", "npu"}
    project.avocadoctl("-H", BOARD, "rollback", board=serving, timeout_s=200)
    assert found(serving) == {"base", "npu", "cam"}
    assert project.status(serving)["problems"] == []
    assert project.deploy(serving).document["outcome"] == "applied"
    assert found(serving) == {"base"}
    links = serving.exec(["ls", "/var/lib/avocado/active/sysext"]).stdout
    assert "module-index" not in links


@pytest.mark.skipif(shutil.which("objcopy") is None, reason="objcopy is not installed: apt-get install binutils")
def test_a_board_that_was_provisioned_with_modules_indexes_them_at_its_first_boot(
    new_board: Callable[[], Board], project: Reference, tmp_path: Path
) -> None:
    module(tmp_path / f"npu/usr/lib/modules/{KERNEL}/extra/npu.ko")
    board = new_board()
    with with_extensions(project, {"npu": tmp_path / "npu"}, "  modprobe: [npu]\n"):
        project.provision(board)
    board.boot()
    wait_until_serving(board, SERVING_S)
    assert found(board) == {"npu"}
    # This kernel is another one, and says so.
    assert [problem["message"] for problem in project.status(board)["problems"]] == [
        "cannot run modprobe -- npu: exit-code"
    ]
    # Nothing is signed of it, and a disk that loses a bit of it would hide the modules of all.
    spoil = (
        "import sys; p = sys.argv[1]; b = open(p, 'rb').read(); open(p, 'r+b').write(b.replace(b'npu.ko', b'npu.kx'))"
    )
    board.exec(["python3", "-I", "-c", spoil, "/var/lib/avocado/active/sysext/99-zz-module-index.raw"])
    assert "zz-module-index" in board.exec(["avocadoctl", "verify"], check=False).stderr
    board.exec(["sync"])
    board.power_cut()
    board.boot()
    wait_until_serving(board, SERVING_S)
    assert found(board) == {"npu"}
    assert project.status(board)["problems"][0] == {
        "code": "module-index-damaged",
        "message": "the index of kernel modules that this board made no longer had the bytes of its name; "
        "it was made anew",
        "remedy": "If it happens again, replace the disk.",
    }
    board.exec(["avocadoctl", "verify"])

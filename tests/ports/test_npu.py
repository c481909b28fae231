"""Who holds a device node or has a file mapped: real processes, and a /proc of our own for those that hang."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.ports.mapped import ProcMappings
from agent.ports.npu import ProcNpu
from agent.ports.proc import unit_of

_OPEN = "import sys; f = open(sys.argv[1], 'rb'); print(flush=True); sys.stdin.read()"
_MAP = """
import mmap, os, sys
d = os.open(sys.argv[1], os.O_RDWR)
m = mmap.mmap(d, 4096)
os.close(d)
# mmap keeps a duplicate; close every descriptor above the standard ones
os.closerange(3, 64)
print(flush=True)
sys.stdin.read()
"""


@contextmanager
def child(program: str, path: Path) -> Iterator[int]:
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        yield process.pid
    finally:
        process.communicate(timeout=10)


def test_a_process_with_the_node_open_is_named(tmp_path: Path) -> None:
    node = tmp_path / "npu0"
    node.write_bytes(bytes(4096))
    assert ProcNpu().holders([str(node)], []) == []
    with child(_OPEN, node) as pid:
        holders = ProcNpu().holders([str(node)], [])
        assert [(h.process.pid, h.node, h.ours, h.process.state) for h in holders] == [(pid, str(node), False, "S")]
        assert holders[0].process.comm.startswith("python")
    assert ProcNpu().holders([str(node)], []) == []


def test_a_node_that_is_closed_but_still_mapped_is_held(tmp_path: Path) -> None:
    node = tmp_path / "npu0"
    node.write_bytes(bytes(4096))
    with child(_MAP, node) as pid:
        assert not [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if os.path.realpath(fd) == str(node)]
        assert [holder.process.pid for holder in ProcNpu().holders([str(node)], [])] == [pid]


def test_a_node_is_found_under_the_link_that_the_profile_names(tmp_path: Path) -> None:
    node = tmp_path / "galcore"
    node.write_bytes(bytes(4096))
    (tmp_path / "npu").symlink_to("galcore")
    with child(_OPEN, node) as pid:
        holders = ProcNpu().holders([str(tmp_path / "npu")], [])
        assert [(holder.process.pid, holder.node) for holder in holders] == [(pid, str(tmp_path / "npu"))]


def fake_process(proc: Path, pid: int, unit: str, *, state: str = "S", maps: str | None = "") -> Path:
    """A process in a /proc of the test's own. `maps` None: nobody can read its map before the test's end."""
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "comm").write_text("python3\n")
    (folder / "stat").write_text(f"{pid} (a (name)) {state} 1 1")
    (folder / "wchan").write_text("simnpu_wait" if state == "D" else "0")
    (folder / "cgroup").write_text(f"0::/system.slice/{unit}\n")
    if maps is None:
        os.mkfifo(folder / "maps")
    else:
        (folder / "maps").write_text(maps)
    return folder


@contextmanager
def released(*folders: Path) -> Iterator[None]:
    """Readers that wait for a map get their end when the test is over."""
    try:
        yield
    finally:
        for folder in folders:
            with contextlib.suppress(OSError):  # nobody waits any more
                os.close(os.open(folder / "maps", os.O_WRONLY | os.O_NONBLOCK))


def test_a_process_whose_map_cannot_be_read_in_time_counts_as_a_holder_and_is_asked_once(tmp_path: Path) -> None:
    proc, node = tmp_path / "proc", tmp_path / "npu0"
    fake_process(proc, 11, "weston.service")
    hung = fake_process(proc, 12, "pose.service", state="D", maps=None)
    holding = fake_process(proc, 13, "pose.service")
    (holding / "fd" / "7").symlink_to(node)
    npu = ProcNpu(proc, patience_s=0.2)
    with released(hung):
        for _ in range(3):
            holders = npu.holders([str(node)], ["pose.service"])
            assert {str(holder) for holder in holders if holder.ours} == {
                f"pid 12 (python3, state D in simnpu_wait) may hold {node}",
                f"pid 13 (python3, state S) holds {node}",
            }
        assert sum(thread.name == "maps" for thread in threading.enumerate()) == 1
    wait_until(lambda: not any(thread.name == "maps" for thread in threading.enumerate()))
    hung.joinpath("maps").unlink()
    hung.joinpath("maps").write_text("")
    assert [str(holder) for holder in npu.holders([str(node)], ["pose.service"])] == [
        f"pid 13 (python3, state S) holds {node}"
    ]


def wait_until(holds: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_unit_of_a_process_is_the_systems_own() -> None:
    assert unit_of("0::/system.slice/pose.service\n") == "pose.service"
    assert unit_of("0::/payload/system.slice/pose.service/workers\n") == "pose.service"
    assert unit_of("12:pids:/x\n1:name=systemd:/system.slice/weston.service\n0::/\n") == "weston.service"
    assert unit_of("0::/user.slice/user-0.slice/session-3.scope\n") == "session-3.scope"
    # A user's manager, or a container's, has units of its own that may be called the same.
    user = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/pose.service\n"
    assert unit_of(user) == "user@1000.service"
    assert unit_of("0::/machine.slice/libpod-1.scope/system.slice/pose.service\n") == "libpod-1.scope"
    assert unit_of("0::/\n") == ""


def test_only_services_that_come_back_are_told_with_their_files(tmp_path: Path) -> None:
    proc, transient = tmp_path / "proc", tmp_path / "transient"
    transient.mkdir()
    (transient / "run-1.service").touch()
    line = "7f00-7f01 r-xp 00000000 00:1f 12 {}\n"
    fake_process(proc, 11, "viewer.service", maps=line.format("/usr/lib/libpose.so") + line.format("[heap]"))
    fake_process(proc, 12, "viewer.service", maps=line.format("/usr/bin/viewer") + "7f02-7f03 rw-p 00000000 00:00 0 \n")
    fake_process(proc, 13, "run-1.service", maps=line.format("/usr/lib/libpose.so"))
    fake_process(proc, 14, "session-3.scope", maps=line.format("/usr/lib/libpose.so"))
    fake_process(proc, 15, "user@1000.service", maps=line.format("/usr/lib/libpose.so"))
    hung = fake_process(proc, 16, "other.service", state="D", maps=None)
    with released(hung):
        found = ProcMappings(proc, transient, patience_s=0.2).by_service()
    assert found.by_service == {"viewer.service": {"/usr/lib/libpose.so", "/usr/bin/viewer"}}
    assert [str(process) for process in found.unread] == ["pid 16 (python3, state D in simnpu_wait)"]

"""Who holds a device node: real processes that have a file open, or only mapped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agent.ports.npu import ProcNpu, _unit_of

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
        assert [(h.pid, h.node, h.ours, h.state) for h in holders] == [(pid, str(node), False, "S")]
        assert holders[0].comm.startswith("python")
    assert ProcNpu().holders([str(node)], []) == []


def test_a_node_that_is_closed_but_still_mapped_is_held(tmp_path: Path) -> None:
    node = tmp_path / "npu0"
    node.write_bytes(bytes(4096))
    with child(_MAP, node) as pid:
        assert not [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if os.path.realpath(fd) == str(node)]
        assert [holder.pid for holder in ProcNpu().holders([str(node)], [])] == [pid]


def test_a_node_is_found_under_the_link_that_the_profile_names(tmp_path: Path) -> None:
    node = tmp_path / "galcore"
    node.write_bytes(bytes(4096))
    (tmp_path / "npu").symlink_to("galcore")
    with child(_OPEN, node) as pid:
        holders = ProcNpu().holders([str(tmp_path / "npu")], [])
        assert [(holder.pid, holder.node) for holder in holders] == [(pid, str(tmp_path / "npu"))]


def test_the_unit_of_a_process_is_the_last_one_in_its_cgroup() -> None:
    assert _unit_of("0::/system.slice/pose.service\n") == "pose.service"
    assert _unit_of("0::/payload/system.slice/pose.service/workers\n") == "pose.service"
    assert _unit_of("12:pids:/x\n1:name=systemd:/system.slice/weston.service\n0::/\n") == "weston.service"
    assert _unit_of("0::/user.slice/user-0.slice/session-3.scope\n") == "session-3.scope"
    assert _unit_of("0::/\n") == ""

"""A disk that is really full: the fetch fails by name, leaves nothing half done, and works once there is room."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.hostile.board import Stage
from tests.hostile.server import Server
from tests.hostile.test_killed import ROOT, SIZE, prepare

SIZE_KIB = SIZE >> 10


@pytest.mark.parametrize(
    ("base", "room_kib"),
    [
        pytest.param(False, 300, id="full, at its beginning"),
        pytest.param(False, 2500, id="full, near its end"),
        pytest.param(True, SIZE_KIB + 1500, id="delta, beside its base"),
    ],
)
def test_a_full_disk_ends_the_fetch_cleanly(stage: Stage, server: Server, base: bool, room_kib: int) -> None:
    private = ["unshare", "--mount", "--propagation", "private"]
    if os.geteuid() != 0 or subprocess.run([*private, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a disk of its own needs root and a mount namespace")
    prepare(stage, base=base)
    ran = subprocess.run(
        [*private, sys.executable, "-m", "tests.hostile.full_disk", str(stage.state), server.url, str(room_kib)],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=ROOT,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    part = stage.state / "images"
    found = json.loads(ran.stdout)
    error = found["error"]
    assert error["code"] == "no-space"
    assert error["message"].startswith(f"cannot write {part}/")
    assert error["message"].endswith(".part: No space left on device")
    assert error["remedy"] == f"Free {SIZE} bytes on the file system of {part}."
    assert (found["left"], found["base_stands"], found["images"]) == ([], True, 2 if base else 1)

"""A disk that is really full, or read-only: what fails is named, nothing is left half done, and room mends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.change.stories import R1
from tests.hostile.board import Stage
from tests.hostile.refusing_disk import IMAGE
from tests.hostile.server import Server
from tests.hostile.test_killed import ROOT, SIZE, prepare

SIZE_KIB = SIZE >> 10
PRIVATE = ["unshare", "--mount", "--propagation", "private"]


@pytest.fixture(autouse=True)
def _own_disk() -> None:
    if os.geteuid() != 0 or subprocess.run([*PRIVATE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("a disk of its own needs root and a mount namespace")


def on_its_own_disk(program: str, *words: str) -> tuple[dict[str, Any], str]:
    """What a program of this folder found, in a mount namespace of its own, and what it logged."""
    line = [*PRIVATE, sys.executable, "-m", f"tests.hostile.{program}", *words]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=50, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout), ran.stderr


@pytest.mark.parametrize(
    ("base", "room_kib"),
    [
        pytest.param(False, 300, id="full, at its beginning"),
        pytest.param(False, 2500, id="full, near its end"),
        pytest.param(True, SIZE_KIB + 1500, id="delta, beside its base"),
    ],
)
def test_a_full_disk_ends_the_fetch_cleanly(stage: Stage, server: Server, base: bool, room_kib: int) -> None:
    prepare(stage, base=base)
    part = stage.state / "images"
    found, _ = on_its_own_disk("full_disk", str(stage.state), server.url, str(room_kib))
    error = found["error"]
    assert error["code"] == "no-space"
    assert error["message"].startswith(f"cannot write {part}/")
    assert error["message"].endswith(".part: No space left on device")
    assert error["remedy"] == f"Free {SIZE} bytes on the file system of {part}."
    assert (found["left"], found["base_stands"], found["images"]) == ([], True, 2 if base else 1)


WRITES = {
    "a file": "changes/1.json",
    "the accepted documents": "cache",
    "a copy of them": "images",
    "a scratch folder": "avocado-test-",
    "a trial by reload": f"runtimes/{R1.id}/confext",
    "the boot's marker": "boot-half.json",
}
REMOVES = {"a begun transfer": f"images/{IMAGE}.part", "an image": f"images/{IMAGE}.raw"}


@pytest.mark.parametrize(
    ("how", "code", "why"),
    [("full", "no-space", "No space left on device"), ("read-only", "disk-failed", "Read-only file system")],
)
def test_whatever_the_agent_writes_or_removes_a_disk_that_refuses_it_is_named(
    tmp_path: Path, how: str, code: str, why: str
) -> None:
    found, logged = on_its_own_disk("refusing_disk", str(tmp_path), how)
    expected = WRITES if how == "full" else WRITES | REMOVES  # the status is not among them: it is only logged
    assert {name: (error["code"], error["message"]) for name, error in found.items()} == {
        name: (code, f"cannot write {tmp_path / path}: {why}") for name, path in expected.items()
    }
    remedies = {name: error["remedy"] for name, error in found.items()}
    assert remedies == {
        name: f"Free space on the file system of {(tmp_path / path).parent}."
        if how == "full"
        else "Check the disk: journalctl -k -b -p warning"
        for name, path in expected.items()
    }
    assert f"cannot publish the status: cannot write {tmp_path}/status.json: {why}" in logged

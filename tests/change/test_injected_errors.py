"""Disk errors at each call of the journal, the store and the runtimes, injected into the system calls with strace.

The agent lives on, so a change whose step met the error goes back, or was past its commit and is finished.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.change.stories import R0, R1, R2
from tests.change.test_on_disk import Disk, images

TREE = Path(__file__).resolve().parents[2]
SEED = 20261201
CALLS = ("fsync", "rename", "mkdir", "symlink", "unlink")
# strace also stops the calls that the interpreter itself makes; none of these is among them once it runs.
FAULTS = (
    ("fsync", "EIO"),
    ("fsync", "ENOSPC"),
    ("rename", "EIO"),
    ("rename", "ENOSPC"),
    ("mkdir", "ENOSPC"),
    ("symlink", "ENOSPC"),
)

pytestmark = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed: apt-get install strace"
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "state"
    Disk(folder)
    return folder


def run(state: Path, *options: str) -> subprocess.CompletedProcess[str]:
    line = ["strace", "-f", "-qq", *options, sys.executable, "-B", "-m", "tests.change.injected", str(state)]
    done = subprocess.run(line, cwd=TREE, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.fixture(scope="module")
def counts(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How often a change without an error makes each call."""
    folder = tmp_path_factory.mktemp("counting")
    shutil.copytree(prepared, folder / "state", symlinks=True)
    seen = folder / "seen"
    done = run(folder / "state", "-o", str(seen), "-e", f"trace={','.join(CALLS)}")
    assert json.loads(done.stdout)["outcome"] == "applied"
    lines = seen.read_text().splitlines()
    return {call: sum(f" {call}(" in f" {line}" for line in lines) for call in CALLS}


def injected(prepared: Path, folder: Path, call: str, error: str, at: int) -> dict[str, Any]:
    shutil.copytree(prepared, folder / "state", symlinks=True)
    done = run(
        folder / "state", "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:error={error}:when={at}"
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def judge(answer: dict[str, Any], where: str) -> None:
    assert answer["outcome"] in ("applied", "reverted", "refused"), (where, answer)
    new = answer["outcome"] == "applied"
    # A `previous` that was set before the rename is put back; either name is on the disk.
    assert (answer["active"], answer["serves"]) == (("R2", "R2") if new else ("R1", "R1")), (where, answer)
    assert answer["previous"] == ("R1" if new else "R0"), (where, answer)
    needed = images(R1, R2) if new else images(R0, R1)
    assert set(needed) <= set(answer["images"]), (where, answer)
    assert answer["outcome"] == "applied" or answer["reason"], (where, answer)


def places(counts: dict[str, int]) -> list[tuple[str, str, int]]:
    return [(call, error, at) for call, error in FAULTS for at in range(1, counts[call] + 1)]


def test_a_disk_error_at_a_random_call_leaves_the_board_old_or_new(
    prepared: Path, counts: dict[str, int], tmp_path: Path
) -> None:
    assert min(counts["fsync"], counts["rename"], counts["mkdir"], counts["symlink"]) > 1, counts
    chosen = random.Random(SEED).sample(places(counts), 6)
    for call, error, at in chosen:
        judge(injected(prepared, tmp_path / f"{call}-{error}-{at}", call, error, at), f"{call} {error} at {at}")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_disk_error_at_each_call_leaves_the_board_old_or_new(
    prepared: Path, counts: dict[str, int], tmp_path: Path
) -> None:
    outcomes: list[str] = []
    for call, error, at in places(counts):
        folder = tmp_path / f"{call}-{error}-{at}"
        answer = injected(prepared, folder, call, error, at)
        judge(answer, f"{call} {error} at {at}")
        outcomes.append(answer["outcome"])
        shutil.rmtree(folder)
    print({outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}, counts)
    assert {"applied", "reverted"} <= set(outcomes)

"""A fetch that is killed at any instant goes on where it was, and the image that comes of it is the right one.

SIGKILL at random instants of the whole way: metadata, transfer, decoding, the reading back and the rename.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from agent.contract.manifest import manifest_bytes
from tests.hostile.board import Stage, image, manifest
from tests.hostile.server import Server

ROOT = Path(__file__).parents[2]
SIZE = 3 << 20
PATIENCE_S = 60.0


@dataclass
class Fetching:
    """The other end of tests/hostile/killed.py."""

    process: subprocess.Popen[str]

    def run(self, limit_s: float = PATIENCE_S) -> tuple[float, int]:
        """How long the fetch lived, and its exit status; minus nine when it was killed at the limit."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{limit_s}\n")
        self.process.stdin.flush()
        lived_s, status = self.process.stdout.readline().split()
        return float(lived_s), int(status)


@contextlib.contextmanager
def fetching(state: Path, url: str) -> Iterator[Fetching]:
    line = [sys.executable, "-m", "tests.hostile.killed", str(state), url]
    scratch = state.with_name("tmp")
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    process = subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    )
    try:
        with process:
            yield Fetching(process)
    finally:
        process.kill()


@cache
def moved() -> bytes:
    """Weights that all moved a little, in no pattern, so that the delta is more than one chunk long."""
    shift = random.Random(3).randbytes(SIZE)
    return bytes((byte + by % 3) % 256 for byte, by in zip(image(0, SIZE), shift, strict=True))


def prepare(stage: Stage, *, base: bool) -> None:
    stage.publish(moved(), bases=[image(0, SIZE)] if base else [])
    if base:
        stage.hold(image(0, SIZE))
        (stage.state / "active.json").write_bytes(manifest_bytes(manifest(image(0, SIZE))))


def kill_and_resume(stage: Stage, server: Server, deaths: int, seed: int) -> int:
    """After each death the next fetch must make the right image; how many went on in the middle of the transfer."""
    images = stage.state / "images"
    wanted = stage.store.part(manifest(moved()).extensions[0].image_id)
    pristine = stage.folder / "pristine"
    shutil.copytree(stage.state, pristine)
    instants = random.Random(seed)
    died = resumed = 0
    with fetching(stage.state, server.url) as fetch:
        whole_s, status = fetch.run()
        assert status == 0
        while died < deaths:
            shutil.rmtree(stage.state)
            shutil.copytree(pristine, stage.state)
            server.asked.clear()
            lived_s, ended = fetch.run(instants.uniform(0, whole_s))
            assert ended in (0, -signal.SIGKILL)
            if ended == 0:
                whole_s = min(whole_s, lived_s)  # this machine is quicker than it was
                continue
            died += 1
            asked = len(server.asked)
            assert fetch.run()[1] == 0
            resumed += any(start not in (None, "bytes=0-") for _, start in server.asked[asked:])
            assert wanted.with_suffix(".raw").read_bytes() == moved()
            assert {path.suffix for path in images.iterdir()} == {".raw"}, "something half done was left behind"
    return resumed


@pytest.mark.parametrize("way", ["delta", "full"])
def test_killed_at_ten_instants_it_resumes_to_the_right_bytes(stage: Stage, server: Server, way: str) -> None:
    prepare(stage, base=way == "delta")
    kill_and_resume(stage, server, 10, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("way", ["delta", "full"])
def test_killed_at_a_hundred_instants_it_resumes_to_the_right_bytes(stage: Stage, server: Server, way: str) -> None:
    prepare(stage, base=way == "delta")
    resumed = kill_and_resume(stage, server, 100, seed=2)
    print(f"{way}: 100 died, {resumed} went on in the middle of the transfer")
    assert resumed > 0

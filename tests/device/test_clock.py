"""The board's clock in 1970, in 2100, and jumping while something is fetched: neither locked out nor frozen."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from agent.contract.manifest import parse_time
from agent.host.keys import Keys
from agent.host.repository import refresh
from tests.device.board import TREE, Board
from tests.device.fake_clock import DEAD, FAR, FakeClock, library
from tests.device.process import holds_within
from tests.device.reference import FIRST_MODEL, NEW_MODEL, Reference, wait_until_serving
from tests.models import read, write

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]

PORT = 8091
STATE = "/var/lib/avocado"
# Everything the board keeps but the lock-like and the growing: the journal of systemd is not below this folder.
DIGEST = f"cd {STATE} && find . -type f -exec sha256sum {{}} + | sort"


@dataclass
class Scene:
    """A serving board under a clock of its own, and the repository it asks."""

    board: Board
    project: Reference
    clock: FakeClock
    repository: Path
    control: Path

    @property
    def url(self) -> str:
        return f"http://{self.board.slot.network.workstation_address}:{PORT}"

    def publish(self, model: Path) -> None:
        self.project.use_model(model)
        self.project.avocadoctl("publish", "-C", str(self.project.folder), "--out", str(self.repository), timeout_s=600)

    def update(self, *options: str) -> subprocess.CompletedProcess[str]:
        """What the timer runs, under the board's clock."""
        line = self.clock.under("avocadoctl", "-o", "json", "update", "--url", self.url, *options)
        return self.board.exec(line, timeout_s=240, check=False)

    def update_while(self, held: str, jump_to: datetime) -> subprocess.CompletedProcess[str]:
        """The same, with a jump of the clock while the answer for a path that fits `held` is on its way."""
        (self.control / "hold").write_text(held)
        done: list[subprocess.CompletedProcess[str]] = []
        asking = threading.Thread(target=lambda: done.append(self.update()))
        asking.start()
        try:
            assert holds_within((self.control / "held").exists, timeout_s=60), f"nobody asked for {held}"
            self.clock.set(jump_to)
        finally:
            for name in ("hold", "held"):
                (self.control / name).unlink(missing_ok=True)
            asking.join(240)
        return done[0]

    def state(self) -> str:
        """Every file of the agent's state with its hash."""
        return self.board.exec(["sh", "-c", DIGEST], timeout_s=60).stdout

    def seen(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.board.exec(["cat", f"{STATE}/metadata/seen.json"]).stdout)
        return found

    def refused(self, done: subprocess.CompletedProcess[str]) -> str:
        """The code of a refusal."""
        assert done.returncode != 0, done.stdout
        return str(json.loads(done.stderr.strip().splitlines()[-1])["code"])


def another_version(folder: Path, version: str) -> Path:
    """An honest model that no board has an image of."""
    shutil.copytree(NEW_MODEL, folder)
    write(folder, {**read(folder), "version": version})
    return folder


@pytest.fixture(scope="module")
def scene(serving: Board, project: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("clock")
    found = library(folder)
    if found is None:
        pytest.skip("a C compiler is not installed, and could not be: apt-get install gcc libc6-dev")
    for name in ("www", "control"):
        (folder / name).mkdir()
    network = serving.slot.network
    within = ["ip", "netns", "exec", network.workstation_namespace, sys.executable, "-m", "tests.device.held_server"]
    words = [*within, str(folder / "www"), network.workstation_address, str(PORT), str(folder / "control")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, cwd=TREE) as server:
        assert holds_within((folder / "control/ready").exists, timeout_s=20)
        made = Scene(serving, project, FakeClock(serving, found), folder / "www", folder / "control")
        made.publish(FIRST_MODEL)
        yield made
        server.communicate(timeout=20)


@pytest.fixture(autouse=True)
def true_clock(scene: Scene) -> Iterator[None]:
    scene.clock.shift(0)
    yield
    scene.clock.shift(0)


def test_a_board_whose_clock_stands_in_1970_takes_a_new_runtime(scene: Scene) -> None:
    scene.publish(NEW_MODEL)
    scene.clock.set(DEAD)
    done = scene.update()
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["outcome"] == "applied"
    assert record["started_at"].startswith("1970-01-01"), "the agent read another clock than the test set"


def test_a_board_whose_clock_stands_in_1970_refuses_what_expired_before_the_newest_build(
    scene: Scene, tmp_path: Path
) -> None:
    """A freeze: a timestamp that is newer than what was seen, and expired before what was seen was built."""
    scene.publish(NEW_MODEL)
    scene.clock.set(DEAD)
    scene.update()
    bygone = parse_time(scene.seen()["built_at"]) - timedelta(days=10)
    shutil.copytree(scene.repository, tmp_path / "kept")
    refresh(scene.repository, Keys(scene.project.folder / "keys"), now=bygone)
    before = scene.state()
    try:
        assert scene.refused(scene.update()) == "repository-stale"
        assert scene.state() == before
    finally:
        shutil.copytree(tmp_path / "kept", scene.repository, dirs_exist_ok=True)


def test_a_clock_in_2100_refuses_everything_and_locks_nobody_out(scene: Scene) -> None:
    scene.publish(FIRST_MODEL)
    before = scene.state()
    scene.clock.set(FAR)
    assert scene.refused(scene.update()) == "root-expired"
    assert scene.state() == before
    # An agent that starts then serves, and writes nothing of that time where it would outlast it.
    scene.clock.restart_agent()
    wait_until_serving(scene.board, 60)
    assert scene.refused(scene.update()) == "root-expired"
    scene.clock.shift(0)
    done = scene.update()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcome"] == "applied"


@pytest.mark.parametrize("jump_to", [FAR, DEAD], ids=["2100", "1970"])
def test_a_clock_that_jumps_in_the_middle_of_a_transfer_neither_ends_nor_prolongs_it(
    scene: Scene, tmp_path: Path, jump_to: datetime
) -> None:
    scene.publish(another_version(tmp_path / "model", f"4.1-{jump_to:%Y}"))
    done = scene.update_while(r"\.(delta|full)$", jump_to)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert (record["outcome"], record["ended_at"][:4]) == ("applied", f"{jump_to:%Y}")


def test_a_jump_back_during_a_refresh_does_not_make_what_expired_acceptable(scene: Scene) -> None:
    scene.clock.shift(30 * 86400)
    before = scene.state()
    assert scene.refused(scene.update_while(r"timestamp\.json$", DEAD)) == "repository-stale"
    assert scene.state() == before

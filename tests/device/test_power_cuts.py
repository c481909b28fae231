"""Pull the plug, or kill the agent, at random instants of real deploys: the board is wholly old or wholly new.

And it serves. Three models take turns, so that every deploy fetches one image, switches and prunes. The instants are
seeded and printed; `AVOCADO_CUT_SEED=N pytest tests/device/test_power_cuts.py` plays them again. `make test` makes a
tenth of what `make test-long` makes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.device.board import TREE, Board
from tests.device.process import holds_within
from tests.device.reference import FIRST_MODEL, NEW_MODEL, Reference, wait_until_serving
from tests.models import read, write

pytestmark = [pytest.mark.device, pytest.mark.timeout(1800)]

SEED = int(os.environ.get("AVOCADO_CUT_SEED", "20261201"))
SERVING_S = 90.0
ENDED_S = 120.0
BUILT_S = 300.0  # what changed since the last deploy is built first
# Before any deploy was measured: about what the board's part of one takes on a busy machine.
FIRST_GUESS_S = 15.0


class Campaign:
    """One board, a project with three models, and what became of every deploy so far."""

    def __init__(self, board: Board, project: Reference, third: Path) -> None:
        self.board = board
        self.project = project
        self._models = [NEW_MODEL, third, FIRST_MODEL]
        self._turn = 0
        self.lasts_s = FIRST_GUESS_S
        self.ended: list[str] = []
        self._said: dict[str, Any] = {}

    @property
    def journal(self) -> Path:
        """The changes on the board's disk, seen from the host."""
        return self.board.slot.disk.root / "var/lib/avocado/changes"

    def newest(self) -> int:
        return max((int(path.stem) for path in self.journal.glob("*.json") if path.stem.isdigit()), default=0)

    def active(self) -> str:
        return (self.board.slot.disk.root / "var/lib/avocado/active").readlink().name

    @contextmanager
    def deploying(self) -> Iterator[tuple[int, subprocess.Popen[str]]]:
        """A deploy of the next model that has just begun to change the board, and the number of its change."""
        self.project.use_model(self._models[self._turn % len(self._models)])
        self._turn += 1
        number = self.newest() + 1
        line = [str(TREE / ".venv/bin/avocadoctl"), "-H", "root@board", "deploy", "-C", str(self.project.folder)]
        command = subprocess.Popen(
            line,
            env=self.project.environment(self.board),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            begun = holds_within(lambda: self.newest() >= number or command.poll() is not None, BUILT_S)
            assert begun, "the deploy did not begin"
            assert command.poll() is None or self.newest() >= number, command.communicate()[0]
            yield number, command
        finally:
            command.kill()
            command.communicate(timeout=30)

    def settled(self, before: str, number: int, instant: str) -> None:
        """The board ended wholly old or wholly new, and says which and why."""
        if not holds_within(self._is_calm, ENDED_S):
            seen = {key: self._said.get(key) for key in ("problems", "change", "inference")}
            pytest.fail(f"{instant}: the board did not settle: {json.dumps(seen)}")
        status = self._said
        records = [record for record in self._records() if record["number"] >= number]
        active = self.active()
        if not records:  # the power went before the journal's first write was on the disk
            assert active == before, instant
            self.ended.append("nothing")
        else:
            record = records[0]
            expected = {"applied": record["to_runtime"], "reverted": before}
            assert record["outcome"] in expected, (instant, record["reason"])
            assert active == expected[record["outcome"]], (instant, record["outcome"])
            assert record["outcome"] == "applied" or record["reason"]["message"], instant
            self.ended.append(record["outcome"])
        assert status["runtime"]["id"] == active, instant
        assert all(row["isMerged"] for row in status["extensions"] if row["origin"] == "runtime"), instant
        assert not [row for row in status["extensions"] if row["isMerged"] and row["origin"] != "runtime"], instant
        folder = self.board.slot.disk.root / "var/lib/avocado/runtimes" / active
        assert {row["version"] for row in status["extensions"] if row["name"] == "pose-model" and row["isMerged"]} == {
            status["inference"]["model"]["version"]
        }, instant
        assert (folder / "manifest.json").is_file(), instant

    def _is_calm(self) -> bool:
        """The agent is there, nothing runs, nothing is wrong, and frames are answered on the NPU."""
        said = self.board.exec(["avocadoctl", "-o", "json", "status"], check=False)
        if said.returncode != 0:
            return False
        self._said = json.loads(said.stdout)
        inference = self._said["inference"] or {}
        change = self._said["change"] or {"outcome": ""}
        answers = inference.get("backend") == "npu" and inference.get("frames", 0) > 0
        return answers and change["outcome"] != "running" and self._said["problems"] == []

    def _records(self) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = json.loads(
            self.board.exec(["avocadoctl", "-o", "json", "history", "-n", "2"]).stdout
        )
        return records


@pytest.fixture(scope="module")
def campaign(new_board: Callable[[], Board], tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    if not (NEW_MODEL / "model.json").exists() or not (FIRST_MODEL / "model.json").exists():
        pytest.skip("the models are not prepared; `make model` prepares them")
    folder = tmp_path_factory.mktemp("cuts")
    third = folder / "third"
    shutil.copytree(NEW_MODEL, third)
    write(third, {**read(third), "version": "4.2"})
    project = Reference.start(folder / "project")
    board = new_board()
    project.provision(board)
    board.boot()
    wait_until_serving(board, SERVING_S)
    made = Campaign(board, project, third)
    # One without a cut: it builds what the first of the others would wait for, and says how long one takes.
    with made.deploying() as (number, command):
        began = time.monotonic()
        said, _ = command.communicate(timeout=ENDED_S)
        assert command.returncode == 0, said
        made.lasts_s = time.monotonic() - began
    made.settled("", number, "the deploy without a cut")
    return made


def at_random_instants(campaign: Campaign, count: int, name: str, strike: Callable[[], None]) -> None:
    """Strike `count` deploys; each is judged before the next one begins."""
    chance = random.Random(f"{SEED} {name}")
    campaign.ended.clear()
    if not campaign.board.is_running():  # a campaign before this one was ended in the middle of a cut
        campaign.board.boot()
    # One instant in each of `count` equal parts of a deploy, in a random order: few of them reach every step, too.
    parts = random.Random(f"{SEED} {name} order").sample(range(count), count)
    for turn, part in enumerate(parts):
        share = (part + chance.random()) / count
        before = campaign.active()
        with campaign.deploying() as (number, _):
            delay_s = share * campaign.lasts_s
            instant = f"seed {SEED}, {name} {turn + 1} of {count}, change {number}, {share:.3f} of it ({delay_s:.2f} s)"
            print(instant, flush=True)
            time.sleep(delay_s)  # the instant itself is what is tried; nothing is waited for
            strike()
        campaign.settled(before, number, instant)
        print(f"  ended {campaign.ended[-1]}", flush=True)
    print({outcome: campaign.ended.count(outcome) for outcome in sorted(set(campaign.ended))}, flush=True)


def cut_the_power(campaign: Campaign) -> Callable[[], None]:
    def strike() -> None:
        campaign.board.power_cut()
        campaign.board.boot()

    return strike


def kill_the_agent(campaign: Campaign) -> Callable[[], None]:
    def main_process() -> str:
        return campaign.board.exec(["systemctl", "show", "-P", "MainPID", "avocadod.service"]).stdout.strip()

    def strike() -> None:
        killed = main_process()
        campaign.board.exec(["systemctl", "kill", "--signal=SIGKILL", "--kill-whom=main", "avocadod.service"])
        # Until systemd has noticed, the agent's last status may be taken for the next one's.
        assert holds_within(lambda: main_process() not in (killed, "0"), ENDED_S), (
            "systemd did not start the agent again"
        )

    return strike


def test_a_power_cut_at_a_random_instant_leaves_the_board_old_or_new(campaign: Campaign) -> None:
    at_random_instants(campaign, 10, "power cut", cut_the_power(campaign))


def test_a_killed_agent_leaves_the_board_old_or_new(campaign: Campaign) -> None:
    at_random_instants(campaign, 5, "kill", kill_the_agent(campaign))


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_hundred_power_cuts_leave_the_board_old_or_new(campaign: Campaign) -> None:
    at_random_instants(campaign, 100, "long power cut", cut_the_power(campaign))
    assert set(campaign.ended) >= {"applied", "reverted"}


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_fifty_killed_agents_leave_the_board_old_or_new(campaign: Campaign) -> None:
    at_random_instants(campaign, 50, "long kill", kill_the_agent(campaign))
    assert set(campaign.ended) >= {"applied", "reverted"}

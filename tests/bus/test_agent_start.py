"""What an avocadod does with what it finds at its start: a change cut short, a journal it cannot read."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest

from agent.config import Config
from agent.contract.errors import EXIT_STATUS, ErrorCode
from agent.daemon import load_or_default
from tests.bus.agent_rig import CHANGE, PATH, TREE, Rig, address, record, rig, serving
from tests.bus.private_bus import environment

__all__ = ["address", "rig"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changing a board needs root, on a test's bus too")


def test_an_interrupted_change_is_reverted_at_start_and_the_bus_shows_it(rig: Rig) -> None:
    record(rig, 1)

    async def use() -> None:
        reply = await rig.ask("Describe", path=f"{PATH}/change/1", interface=CHANGE)
        document = json.loads(reply.body[0])
        assert document["outcome"] == "reverted"
        assert document["reason"]["message"].startswith("cannot finish change 1: the agent was restarted")
        listed = json.loads((await rig.ask("ListChanges", "u", [1])).body[0])
        assert [change["number"] for change in listed] == [1]

    serving(rig, use)


def test_an_unreadable_journal_leaves_the_status_readable_and_every_change_refused_by_its_reason(rig: Rig) -> None:
    (rig.state / "changes").mkdir()
    (rig.state / "changes/1.json").write_text('{"schema": 99}')

    async def use() -> None:
        error = await rig.error("Refresh", "a{sv}", [{}])
        assert error.code is ErrorCode.NEWER_SCHEMA
        assert error.message == "cannot read the change record: schema 99, this agent reads 1 of change 1"
        document = json.loads((await rig.ask("Describe")).body[0])
        assert [problem["code"] for problem in document["problems"]] == ["newer-schema"]

    serving(rig, use, refused_with="org.avocado.Error.NewerSchema")


def test_an_unreadable_journal_does_not_keep_the_boot_half_from_running(rig: Rig) -> None:
    (rig.state / "changes").mkdir()
    record = rig.state / "changes/1.json"
    record.write_text('{"schema": 99}')

    async def use() -> None:
        assert (rig.run_dir / "boot-half.json").exists()
        # Whoever put it right need not restart the agent.
        record.unlink()
        assert (await rig.error("Refresh", "a{sv}", [{}])).code is ErrorCode.NOT_FOUND
        assert json.loads((await rig.ask("Describe")).body[0])["problems"] == []

    serving(rig, use, refused_with="org.avocado.Error.NewerSchema")


def test_a_wrong_configuration_is_a_problem_and_not_the_end_of_the_agent(rig: Rig) -> None:
    # The defaults name the board's own folders; this machine has none of them, so nothing but the status is asked for.
    rig.config.write_text("stauts_interval_s = 1\n")
    config, problems = load_or_default(rig.config)
    assert config == Config()
    assert [problem.code for problem in problems] == ["bad-config"]
    assert str(rig.config) in problems[0].message


def test_a_new_agent_says_whether_it_could_start_beside_the_one_that_serves(rig: Rig) -> None:
    async def checked(bus: str) -> tuple[int, str]:
        path = f"{rig.folder / 'bin'}:{os.environ['PATH']}"
        line = [sys.executable, "-m", "agent.daemon", "--check", "--config", str(rig.config)]
        ran = await asyncio.create_subprocess_exec(
            *line, cwd=TREE, env=environment(bus, PATH=path), stderr=asyncio.subprocess.PIPE
        )
        _, said = await asyncio.wait_for(ran.communicate(), 60)
        return ran.returncode or 0, said.decode()

    async def use() -> None:
        assert await checked(rig.address) == (0, "")
        assert (await rig.error("Refresh", "a{sv}", [{}])).code is ErrorCode.NOT_FOUND
        status, said = await checked("unix:path=/nowhere/bus")
        assert status == 3
        assert "cannot reach the system bus" in said

    serving(rig, use)


def test_a_run_folder_that_cannot_be_made_ends_the_agent_with_one_line_that_names_it(rig: Rig) -> None:
    rig.run_dir.rmdir()
    rig.run_dir.write_text("in the way")

    async def scenario() -> int:
        await rig.systemd.appear(rig.address)
        try:
            rig.start()
            return await asyncio.to_thread(rig.process.wait, 20)
        finally:
            rig.systemd.leave()

    assert asyncio.run(scenario()) == EXIT_STATUS[ErrorCode.DISK_FAILED]
    said = (rig.folder / "log").read_text()
    assert f"cannot write {rig.run_dir}: File exists (try: Check the disk: journalctl -k -b -p warning)" in said
    assert "Traceback" not in said

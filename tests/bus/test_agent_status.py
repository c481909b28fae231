"""The status that a running avocadod gives: on the bus, in its file, and what is wrong with whom it asks."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest

from agent.contract.errors import ErrorCode
from tests.bus.agent_rig import TREE, Rig, address, rig, serving
from tests.bus.fake_inference import FakeInference
from tests.bus.private_bus import environment

__all__ = ["address", "rig"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changing a board needs root, on a test's bus too")


@pytest.mark.parametrize(
    ("hangs", "message"),
    [
        (True, "cannot get an answer from org.avocado.Inference1 on the system bus: nothing in 2 s"),
        (False, "cannot read the pose service's state: it is not JSON"),
    ],
)
def test_a_pose_service_that_does_not_answer_is_a_problem_and_keeps_no_change_back(
    rig: Rig, hangs: bool, message: str
) -> None:
    inference = FakeInference()
    inference.hangs, inference.document = hangs, "no JSON"

    async def use() -> None:
        await inference.appear(rig.address)
        try:
            # Refused for want of a runtime, as on any other day.
            assert (await rig.error("Refresh", "a{sv}", [{}])).code is ErrorCode.NOT_FOUND
            document = json.loads((await rig.ask("Describe")).body[0])
            assert (document["inference"]["state"], document["inference"]["message"]) == ("silent", message)
            assert document["problems"] == [
                {
                    "code": "inference-silent",
                    "message": message,
                    "remedy": "Start it again: systemctl restart pose.service",
                }
            ]
        finally:
            inference.leave()

    serving(rig, use)


def test_describe_is_the_status_document_and_the_file_says_the_same(rig: Rig) -> None:
    async def use() -> None:
        document = json.loads((await rig.ask("Describe")).body[0])
        assert (document["target"], document["arch"], document["runtime"]) == ("virtual", "x86_64", None)
        assert document["agent"]["pid"] == rig.process.pid
        file = json.loads((rig.run_dir / "status.json").read_text())
        assert file["schema"] == document["schema"] == 1
        assert (rig.run_dir / "status.json").stat().st_mode & 0o777 == 0o640

    serving(rig, use)


def test_avocadoctl_reads_the_status_without_the_bus_and_says_when_the_agent_is_gone(rig: Rig) -> None:
    def status(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "agent.cli", "status", *words]
        env = environment("unix:path=/nowhere", AVOCADO_RUN_DIR=str(rig.run_dir))
        return subprocess.run(command, cwd=TREE, env=env, capture_output=True, text=True, timeout=20)

    async def use() -> None:
        finished = await asyncio.to_thread(status, "-o", "json")
        assert finished.returncode == 0, finished.stderr
        assert json.loads(finished.stdout)["problems"] == []

    serving(rig, use)
    gone = status()
    assert "the agent is not running" in gone.stdout
    assert "try: See why: systemctl status avocadod" in gone.stdout


def test_a_tool_of_systemd_that_fails_is_a_problem_and_not_the_end_of_the_agent(rig: Rig) -> None:
    (rig.folder / "bin/systemd-confext").write_text("#!/bin/sh\necho 'no such thing' >&2; exit 1\n")

    async def use() -> None:
        document = json.loads((await rig.ask("Describe")).body[0])
        assert "cannot run systemd-confext: no such thing" in [problem["message"] for problem in document["problems"]]

    serving(rig, use, refused_with="org.avocado.Error.SwitchFailed")

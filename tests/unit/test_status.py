"""The status document: what a reader makes of it, and what it says about its own age."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.status import StatusDocument, agent_entry, boottime_s, change_entry, read_status
from agent.publish import StatusKeeper, write_status
from agent.verbs.show import ago, size, table
from agent.verbs.status import render

SEEN = {
    "state": "serving",
    "backend": "npu",
    "reason": "ok",
    "model": {"name": "movenet", "version": "4.1"},
    "frames": 700,
    "fallbacks": 3,
    "latency_ms": {"p95": 9.0},
    "seen_boottime_s": 1000.0,
}


def document(**changes: Any) -> StatusDocument:
    made: dict[str, Any] = {
        "schema": 1,
        "target": "virtual",
        "arch": "x86_64",
        "agent": agent_entry("0.1.0", 5.0, "2026-11-30T22:00:00Z"),
        "runtime": {
            "name": "npu-pose",
            "version": "1.1.0",
            "id": "11111111-1111-4111-8111-111111111111",
            "built_at": "2026-11-30T21:00:00Z",
            "manifest_version": 1,
        },
        "previous": None,
        "runtimes": [],
        "extensions": [
            {
                "name": "pose-model",
                "version": "4.1",
                "isSysext": True,
                "isConfext": False,
                "isMerged": True,
                "origin": "runtime",
                "imageId": "90dcfbed-0000-5000-8000-000000000000",
                "shortId": "90dcfbed",
                "sha256": "0" * 64,
                "merge_name": "98-pose-model",
                "services": ["pose.service"],
            }
        ],
        "services": [
            {
                "name": "pose.service",
                "load": "loaded",
                "active": "active",
                "sub": "running",
                "result": "success",
                "restarts": 2,
            }
        ],
        "inference": {
            "state": "degraded",
            "backend": "cpu",
            "reason": "hung",
            "model": {"name": "movenet-lightning", "version": "4.1"},
            "frames": 500,
            "fallbacks": 3,
            "latency_ms": {"p95": 21.04},
        },
        "change": None,
        "problems": [],
    }
    return {**made, **changes}  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("inference", "says"),
    [
        (None, "not on the bus"),
        (
            {"state": "silent", "backend": "none", "reason": "no answer", "last_seen": None},
            "the pose service does not answer, and has not since the agent started",
        ),
        (
            {"state": "silent", "backend": "none", "reason": "no answer", "last_seen": SEEN},
            "the pose service does not answer; last seen 40 s ago: serving on npu (ok), model movenet 4.1, 700 frames,"
            " 3 by fallback, p95 9.0 ms",
        ),
    ],
)
def test_a_pose_service_that_hangs_is_told_from_one_that_is_not_there_and_from_one_that_answers(
    inference: Any, says: str
) -> None:
    made = document(inference=inference)
    made["agent"]["updated_boottime_s"] = 1038.0
    assert f"Inference  {says}" in render(made, 2.0).splitlines()


class Service:
    """A pose service that answers, hangs, and answers again."""

    def __init__(self, *answers: Mapping[str, Any] | OperationError | None) -> None:
        self._answers = iter(answers)

    async def ask(self) -> Mapping[str, Any] | None:
        answer = next(self._answers)
        if isinstance(answer, OperationError):
            raise answer
        return answer


def test_the_last_answer_of_a_service_that_hangs_is_kept_with_its_time(tmp_path: Path) -> None:
    hangs = OperationError(ErrorCode.STEP_TIMEOUT, "cannot get an answer")
    asked: list[Any] = []

    def gather(inference: Mapping[str, Any] | None) -> StatusDocument:
        asked.append(inference)
        return document(inference=inference)

    keeper = StatusKeeper(gather, Service(hangs, {"state": "serving", "frames": 7}, hangs, hangs).ask, tmp_path, 5.0)
    before = boottime_s()
    for _ in range(4):
        asyncio.run(keeper.refresh())
    said = {"state": "silent", "backend": "none", "reason": "no answer", "message": "cannot get an answer"}
    assert asked[0] == {**said, "last_seen": None}
    last = asked[2]["last_seen"]
    assert (last["state"], last["frames"], asked[3]["last_seen"]) == ("serving", 7, last)
    assert before <= last["seen_boottime_s"] + 0.001 <= boottime_s() + 0.001


def test_what_is_disabled_here_is_named(tmp_path: Path) -> None:
    made = document()
    assert made["runtime"]
    made["runtime"]["disabled"] = ["pose-config", "viewer"]
    made["extensions"].append({**made["extensions"][0], "name": "viewer", "isMerged": False, "isDisabled": True})
    text = render(made, 2.0)
    assert "built 2026-11-30T21:00:00Z, without pose-config, viewer (disabled here)" in text
    assert "viewer      sysext  disabled  4.1      runtime  90dcfbed" in text


def test_the_text_for_people_says_who_answers_the_camera_and_why() -> None:
    text = render(document(), 2.0)
    assert text.splitlines() == [
        "Board      virtual (x86_64), agent 0.1.0, 2 s ago",
        "Runtime    npu-pose 1.1.0  11111111-1111-4111-8111-111111111111  built 2026-11-30T21:00:00Z",
        "Previous   none",
        "Inference  degraded on cpu (hung), model movenet-lightning 4.1, 500 frames, 3 by fallback, p95 21.0 ms",
        "Change     none yet",
        "",
        "EXTENSION   TYPE    MERGED  VERSION  ORIGIN   ID",
        "pose-model  sysext  yes     4.1      runtime  90dcfbed",
        "",
        "SERVICE       STATE             RESTARTS",
        "pose.service  active (running)  2",
        "",
        "Problems   none",
    ]


def test_a_problem_is_shown_with_what_to_type_next_and_a_change_with_why_it_went_back() -> None:
    record = {
        "number": 7,
        "kind": "deploy",
        "outcome": "reverted",
        "steps": [{"kind": "switch_overlay", "phase": "undone"}],
        "from_runtime": None,
        "to_runtime": "x",
        "started_at": "2026-11-30T22:00:00Z",
        "ended_at": "2026-11-30T22:00:09Z",
        "reason": {
            "code": "unhealthy",
            "message": "cannot keep the new set: the golden frame failed",
            "remedy": "Look.",
        },
        "facts": {"moved_bytes": 4976, "image_bytes": 2949120, "away_s": 3.2},
    }
    problem = {"code": "not-merged", "message": "extension x is wanted but not merged", "remedy": "avocadoctl refresh"}
    text = render(document(change=change_entry(record), problems=[problem]), 2.0)
    assert (
        "Change     #7 deploy: reverted, 2026-11-30T22:00:09Z, moved 4.9 KiB of 2.8 MiB, service away 3.20 s\n"
        "           cannot keep the new set: the golden frame failed\n"
        "             try: Look.\n"
    ) in text
    assert text.endswith("Problems   1\n  extension x is wanted but not merged\n    try: avocadoctl refresh")


def test_switching_with_a_gap_is_shown_with_its_reason_and_without_one_is_not_worth_a_line() -> None:
    gap = document(switching={"way": "reload", "reason": "/usr is merged mutable"})
    assert "Switching  by systemd's reload, with a gap: /usr is merged mutable\n" in render(gap, 0.0)
    assert "Switching" not in render(document(switching={"way": "gapless", "reason": ""}), 0.0)


def test_a_fresh_document_of_a_living_agent_is_read_as_it_is(tmp_path: Path) -> None:
    write_status(tmp_path / "status.json", document())
    assert read_status(tmp_path)["problems"] == []
    assert (tmp_path / "status.json").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_the_last_words_of_a_dead_agent_are_told_as_such(tmp_path: Path) -> None:
    gone = document()
    gone["agent"]["started_ticks"] -= 1  # the pid is there, and belongs to another process
    write_status(tmp_path / "status.json", gone)
    assert read_status(tmp_path)["problems"][0]["code"] == "agent-gone"


def test_a_killed_agent_that_nobody_has_reaped_yet_is_gone(tmp_path: Path) -> None:
    agent = subprocess.Popen(["sleep", "60"])
    stat = Path(f"/proc/{agent.pid}/stat")
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    written = document()
    written["agent"] |= {"pid": agent.pid, "started_ticks": ticks}
    write_status(tmp_path / "status.json", written)
    assert "agent-gone" not in {problem["code"] for problem in read_status(tmp_path)["problems"]}
    agent.kill()
    os.waitid(os.P_PID, agent.pid, os.WEXITED | os.WNOWAIT)
    assert read_status(tmp_path)["problems"][0]["code"] == "agent-gone"
    agent.wait()


def test_an_agent_that_writes_no_more_is_told_as_silent_whatever_the_wall_clock_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = document()
    old["agent"]["updated_boottime_s"] = boottime_s() - 16
    write_status(tmp_path / "status.json", old)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    problem = read_status(tmp_path)["problems"][0]
    assert problem["message"] == "the agent has not written its status for 16 s"


def test_no_status_and_a_broken_one_and_a_forbidden_one_are_three_different_errors(tmp_path: Path) -> None:
    with pytest.raises(OperationError) as absent:
        read_status(tmp_path)
    assert absent.value.code is ErrorCode.AGENT_UNREACHABLE
    (tmp_path / "status.json").write_text('{"agent": {}}')
    with pytest.raises(OperationError) as broken:
        read_status(tmp_path)
    assert broken.value.code is ErrorCode.INTERNAL
    (tmp_path / "status.json").chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read everything
    try:
        with pytest.raises(OperationError) as forbidden:
            read_status(tmp_path)
    finally:
        os.seteuid(user)
    assert forbidden.value.code is ErrorCode.NOT_PERMITTED


def test_upstream_keys_are_kept() -> None:
    made = json.loads(json.dumps(document()))
    assert set(made["runtime"]) >= {"name", "version", "id", "built_at", "manifest_version"}
    upstream = {"name", "version", "isSysext", "isConfext", "isMerged", "origin", "imageId"}
    assert set(made["extensions"][0]) >= upstream


def test_sizes_ages_and_columns_are_short() -> None:
    assert [size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 30)] == ["0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3.0 GiB"]
    assert [ago(s) for s in (0.4, 59, 61, 3600, 7200, 200000)] == ["0 s", "59 s", "1 min", "60 min", "2 h", "2 d"]
    assert table(("A", "LONG"), [("value", "x")]) == "A      LONG\nvalue  x"

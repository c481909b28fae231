"""What only systemd can show of recovery: a hung supervisor, and a rung that root carries out for the pose service."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.device.board import Board
from tests.device.process import holds_within
from tests.device.reference import wait_until_serving

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]

SERVING_S = 90.0
PATIENCE_S = 60.0
REQUEST = "/run/avocado-pose/reset-request"
ANSWER = "/run/avocado-pose-reset/answer.json"
LADDER = """
name = "virtual"
kind = "npu"
nodes = ["/dev/simnpu0"]
[delegate]
path = "/usr/lib/avocado/npu/libsimnpu.so"
[reset]
ladder = ["new_worker", "rebind", "reboot"]
limits = { reboot = 1 }
"""


def show(board: Board, unit: str, name: str) -> str:
    return board.exec(["systemctl", "show", "-P", name, unit]).stdout.strip()


def ask(board: Board, number: int, rung: str) -> None:
    """What the supervisor does, as the user it runs as."""
    text = json.dumps({"number": number, "rung": rung})
    script = f"echo '{text}' > {REQUEST}.new && mv {REQUEST}.new {REQUEST}"
    board.exec(["runuser", "-u", "avocado-infer", "--", "sh", "-c", script])


def answered(board: Board, number: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def there() -> bool:
        said = board.exec(["cat", ANSWER], check=False).stdout
        found.update(json.loads(said) if said else {})
        return found.get("number") == number

    assert holds_within(there, PATIENCE_S), board.exec(["journalctl", "-u", "pose-reset", "-n", "20"]).stdout
    return found


def use_ladder(board: Board) -> None:
    """A profile with rungs, for the root unit alone and until the next boot."""
    board.exec(["tee", "/run/ladder.toml"], input_text=LADDER)
    board.exec(["mkdir", "-p", "/run/systemd/system/pose-reset.service.d"])
    command = "[Service]\nExecStart=\nExecStart=/usr/bin/avocado-infer reset --profile /run/ladder.toml\n"
    board.exec(["tee", "/run/systemd/system/pose-reset.service.d/ladder.conf"], input_text=command)
    board.exec(["systemctl", "daemon-reload"])


def test_a_supervisor_that_stands_still_is_recovered_by_systemd(serving: Board) -> None:
    service = show(serving, "pose.service", "MainPID")
    children = serving.exec(["cat", f"/proc/{service}/task/{service}/children"]).stdout.split()
    assert len(children) == 1, "the service has one child, the supervisor"
    serving.exec(["kill", "-STOP", children[0]])
    assert holds_within(lambda: show(serving, "pose.service", "MainPID") not in (service, "0"), PATIENCE_S)
    wait_until_serving(serving, SERVING_S)
    said = serving.exec(["journalctl", "-u", "pose.service", "-b", "-o", "cat"]).stdout
    assert "heartbeat is" in said
    assert "watchdog timeout" in said.lower()
    assert not serving.exec(["ps", "-o", "pid=", "-p", children[0]], check=False).stdout.strip()


def test_the_service_may_ask_only_for_what_the_boards_profile_grants(serving: Board) -> None:
    ask(serving, 1, "reboot")
    told = answered(serving, 1)
    assert told == {"number": 1, "done": False, "message": "cannot reboot: profile virtual does not grant it"}
    assert serving.exec(["ls", REQUEST], check=False).returncode != 0, "the request was taken away"
    owner = serving.exec(["stat", "-c", "%U %a", "/run/avocado-pose-reset"]).stdout.strip()
    assert owner == "root 755"


def test_a_reboot_is_carried_out_once_and_counted_over_the_reboot(serving: Board) -> None:
    use_ladder(serving)
    ask(serving, 2, "reboot")
    serving.wait_until_off(timeout_s=PATIENCE_S)
    serving.boot()
    wait_until_serving(serving, SERVING_S)
    use_ladder(serving)
    ask(serving, 3, "reboot")
    told = answered(serving, 3)
    assert told["message"] == "cannot reboot: 1 of 1 reboots were used and the NPU failed again"

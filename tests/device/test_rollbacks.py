"""Every way a new set can be bad, deployed for real: the board says which it was, and serves on the old set again.

Each bad set is the reference application with one small extension on top of it.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.device.board import TREE, Board
from tests.device.process import holds_within
from tests.device.reference import Reference, wait_until_serving

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]

SERVING_S = 60.0
PROFILE = TREE / "inference/accelerators/virtual.toml"
DROP_IN = "usr/lib/systemd/system/pose.service.d/10-spoiled.conf"


def drop_in(*lines: str) -> str:
    return "\n".join(["[Service]", "ExecStart=", *lines]) + "\n"


def profile(**changes: str) -> str:
    """The virtual board's profile with other values; keys that are new go into the delegate's options."""
    text = PROFILE.read_text(encoding="utf-8")
    for key, value in changes.items():
        old = next((line for line in text.splitlines() if line.startswith(f"{key} = ")), None)
        if old is not None:
            text = text.replace(old, f"{key} = {value}")
        else:
            text = text.replace("[delegate.options]\n", f"[delegate.options]\n{key} = {value}\n")
    return text


@dataclass(frozen=True)
class Spoiled:
    """A set that must not stay: the files on top of the good one, and how the change has to end."""

    code: str
    says: str
    files: dict[str, str] = field(default_factory=dict)


CASES = {
    "crash loop": Spoiled(
        "unhealthy",
        "pose.service",
        {
            DROP_IN: drop_in(
                "ExecStart=/bin/sh -c 'systemd-notify --ready; sleep 1; exit 3'", "NotifyAccess=all", "WatchdogSec=0"
            )
        },
    ),
    "start timeout": Spoiled(
        "unit-failed",
        "timeout",
        {DROP_IN: drop_in("ExecStart=/usr/bin/sleep infinity", "TimeoutStartSec=2s")},
    ),
    "NPU required but the CPU answered": Spoiled(
        "unhealthy",
        "requires the NPU, but the backend is cpu (refused)",
        {"usr/share/avocado/accelerator.toml": profile(fail='"create"')},
    ),
    "hang at the first invoke": Spoiled(
        "unhealthy",
        "requires the NPU, but the backend is cpu",
        {"usr/share/avocado/accelerator.toml": profile(hang_at='"1"', first_invoke_s="2.0")},
    ),
    "missing library": Spoiled(
        "unhealthy",
        "requires the NPU, but the backend is cpu",
        {"usr/share/avocado/accelerator.toml": profile(path='"/usr/lib/avocado/npu/libspoiled.so"')},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_set_is_rolled_back_with_its_reason(
    serving: Board, project: Reference, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    before = project.status(serving)
    tree = tmp_path / "spoiled"
    for inside, text in case.files.items():
        (tree / inside).parent.mkdir(parents=True, exist_ok=True)
        (tree / inside).write_text(text, encoding="utf-8")
    if name == "missing library":
        library_with_a_hole(tree / "usr/lib/avocado/npu/libspoiled.so", tmp_path)
    with on_top(project, tree):
        ran = project.deploy(serving, check=False)
    document = ran.document
    assert (document["outcome"], document["error"]["code"]) == ("reverted", case.code), document["error"]
    assert case.says in document["error"]["message"]
    wait_until_serving(serving, SERVING_S)
    after = project.status(serving)
    assert after["runtime"] == before["runtime"]
    assert after["change"]["number"] == document["change"]["number"]
    assert after["problems"] == []
    shown = {row["name"] for row in after["extensions"] if row["isMerged"]}
    assert shown == {row["name"] for row in before["extensions"] if row["isMerged"]}


def test_a_configuration_that_locks_everybody_out_is_taken_back_by_itself(
    serving: Board, project: Reference, tmp_path: Path
) -> None:
    before = project.status(serving)["runtime"]
    tree = tmp_path / "spoiled"
    (tree / "etc").mkdir(parents=True)
    # sshd refuses a user whose shell does not exist; connections that are open stay.
    users = serving.exec(["cat", "/etc/passwd"]).stdout
    assert users.startswith("root:")
    first, _, rest = users.partition("\n")
    (tree / "etc/passwd").write_text(f"{first.rpartition(':')[0]}:/nowhere\n{rest}", encoding="utf-8")
    with on_top(project, tree, "types: [confext]", confirm_within_s=8):
        ran = project.deploy(serving, check=False)
    error = ran.document["error"]
    assert (ran.status, error["code"], ran.document["outcome"]) == (49, "not-confirmed", "reverted"), ran
    assert error["message"] == "cannot keep the new /etc: the host did not come back over a new connection within 8 s"
    assert "cannot confirm change" in ran.stderr
    after = project.status(serving)  # over a new connection
    assert (after["runtime"], after["problems"]) == (before, [])

    # Somebody on the board takes it all the same, and goes back; then a host asks for it without knowing.
    with on_top(project, tree, "types: [confext]", confirm_within_s=20):
        deploying = threading.Thread(target=project.deploy, args=(serving,), kwargs={"check": False})
        deploying.start()
        confirm_on_the_board(serving)
        deploying.join(120)
    bad = serving.exec(["readlink", "/var/lib/avocado/active"]).stdout
    assert before["id"] not in bad
    serving.exec(["avocadoctl", "rollback"], timeout_s=120)
    assert project.status(serving)["runtime"] == before
    ran = project.avocadoctl("-H", "root@board", "rollback", board=serving, check=False, timeout_s=200)
    assert (ran.status, "await_confirmation" in ran.stderr) == (49, True), ran
    after = project.status(serving)
    assert (after["runtime"], after["problems"], after["change"]["kind"]) == (before, [], "rollback")


def test_a_set_that_is_merged_by_hand_while_the_host_is_awaited_is_not_kept(
    serving: Board, project: Reference, tmp_path: Path
) -> None:
    before = project.status(serving)["runtime"]
    tree = tmp_path / "spoiled"
    (tree / "etc").mkdir(parents=True)
    users = serving.exec(["cat", "/etc/passwd"]).stdout
    first, _, rest = users.partition("\n")
    (tree / "etc/passwd").write_text(f"{first.rpartition(':')[0]}:/nowhere\n{rest}", encoding="utf-8")
    ran: list[Any] = []
    with on_top(project, tree, "types: [confext]", confirm_within_s=60):
        deploying = threading.Thread(target=lambda: ran.append(project.deploy(serving, check=False)))
        deploying.start()

        def waits() -> bool:
            changes = json.loads(serving.exec(["avocadoctl", "-o", "json", "history", "-n", "1"]).stdout)
            steps = [step for change in changes for step in change["steps"]]
            return any(step["kind"] == "await_confirmation" and step["phase"] == "doing" for step in steps)

        assert holds_within(waits, 120)
        # The host gets in again, but through the old /etc.
        serving.exec(["sh", "-c", "systemd-sysext refresh && systemd-confext refresh"], timeout_s=60)
        deploying.join(120)
    error = ran[0].document["error"]
    assert (ran[0].document["outcome"], error["code"]) == ("reverted", "switch-failed"), ran
    assert "the merged set was changed during the trial" in error["message"]
    after = project.status(serving)
    assert (after["runtime"], after["problems"]) == (before, [])


def confirm_on_the_board(board: Board) -> None:
    """As soon as the running change waits for it."""

    def confirmed() -> bool:
        newest = json.loads(board.exec(["avocadoctl", "-o", "json", "history", "-n", "1"]).stdout)[0]
        return board.exec(["avocadoctl", "confirm", str(newest["number"])], check=False).returncode == 0

    assert holds_within(confirmed, 120)


def test_a_configuration_that_lets_the_host_back_in_is_kept_and_rolls_back_at_once(
    serving: Board, project: Reference, tmp_path: Path
) -> None:
    before = project.status(serving)["runtime"]
    tree = tmp_path / "fine"
    (tree / "etc/avocado").mkdir(parents=True)
    (tree / "etc/avocado/note").write_text("kept\n", encoding="utf-8")
    with on_top(project, tree, "types: [confext]", confirm_within_s=60):
        document = project.deploy(serving).document
    assert document["outcome"] == "applied"
    assert "await_confirmation" in {step["kind"] for step in document["change"]["steps"]}
    assert serving.ssh(["cat", "/etc/avocado/note"]).stdout == "kept\n"
    ran = project.avocadoctl("-H", "root@board", "rollback", board=serving, timeout_s=200)
    assert "await_confirmation" in ran.stderr
    assert project.status(serving)["runtime"] == before
    # What laid /etc anew is confirmed as well, and what leaves it alone is not.
    serving.exec(["systemd-confext", "unmerge"])
    for waits in (True, False):
        ran = project.avocadoctl("-H", "root@board", "refresh", board=serving, timeout_s=200)
        assert ("await_confirmation" in ran.stderr) == waits
    assert project.status(serving)["problems"] == []


def test_a_dry_run_is_planned_and_nothing_else_remembers_it(serving: Board, project: Reference, tmp_path: Path) -> None:
    before = project.status(serving)
    tree = tmp_path / "planned"
    (tree / "etc/avocado").mkdir(parents=True)
    (tree / "etc/avocado/note").write_text("planned\n", encoding="utf-8")
    with on_top(project, tree, "types: [confext]"):
        document = project.deploy(serving, "--dry-run").document
    assert document["outcome"] == "planned"
    newest = json.loads(serving.ssh(["avocadoctl", "-o", "json", "history", "-n", "1"]).stdout)[0]
    assert (newest["number"], newest["outcome"]) == (document["change"]["number"], "planned")
    after = project.status(serving)
    assert (after["runtime"], after["change"]) == (before["runtime"], before["change"])


def test_a_new_agent_extension_leaves_the_agent_and_the_services_running(serving: Board, project: Reference) -> None:
    units = ["avocadod.service", "pose.service"]
    before = serving.exec(["systemctl", "show", "-P", "MainPID", *units]).stdout
    path = project.folder / "avocado.yaml"
    good = path.read_text(encoding="utf-8")
    (project.folder / "note").write_text("new\n", encoding="utf-8")
    files = "      usr/lib/userdb/avocado.group:"
    assert files in good
    changed = good.replace(files, f"      usr/share/avocado/note: note\n{files}", 1)
    changed = changed.replace('avocado-agent:\n    version: "0.1.0"', 'avocado-agent:\n    version: "0.1.1"', 1)
    assert "0.1.1" in changed
    path.write_text(changed, encoding="utf-8")
    try:
        document = project.deploy(serving).document
    finally:
        path.write_text(good, encoding="utf-8")
    assert document["outcome"] == "applied"
    assert {move["name"] for move in document["moves"] if move["changed"]} == {"avocado-agent"}
    assert serving.ssh(["cat", "/usr/share/avocado/note"]).stdout == "new\n"
    assert serving.exec(["systemctl", "show", "-P", "MainPID", *units]).stdout == before
    problem = project.status(serving)["problems"][0]
    assert problem == {
        "code": "agent-outdated",
        "message": "avocado-agent 0.1.1 is merged, and the agent still runs from the image before it",
        "remedy": "Run: systemctl restart avocadod",
    }
    serving.exec(problem["remedy"].removeprefix("Run: ").split())
    wait_until_serving(serving, SERVING_S)
    agent, pose = serving.exec(["systemctl", "show", "-P", "MainPID", *units]).stdout.split()
    assert [agent != before.split()[0], pose] == [True, before.split()[1]]
    after = project.status(serving)
    assert (after["runtime"]["id"], after["problems"]) == (document["to_runtime"], [])


@pytest.mark.parametrize("status", [1, 2])
def test_an_agent_that_would_not_start_is_not_kept_and_one_too_old_for_the_question_is(
    serving: Board, project: Reference, tmp_path: Path, status: int
) -> None:
    before = project.status(serving)
    program = tmp_path / "tree/usr/bin/avocadod"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\nexit {status}\n", encoding="utf-8")
    program.chmod(0o755)
    (project.folder / "note").write_text(f"ends with {status}\n", encoding="utf-8")
    files = "      usr/lib/userdb/avocado.group:"
    with on_top(project, tmp_path / "tree"):
        path = project.folder / "avocado.yaml"
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(files, f"      usr/share/avocado/note: note\n{files}", 1), encoding="utf-8")
        ran = project.deploy(serving, check=False)
    if status == 1:
        assert (ran.status, ran.document["outcome"], ran.document["error"]["message"]) == (
            43,
            "reverted",
            "cannot confirm the new set: the agent that it brings would not start:"
            " cannot run /usr/bin/avocadod --check: exit-code",
        )
    else:
        step = next(step for step in ran.document["change"]["steps"] if step["kind"] == "confirm_health")
        assert (ran.document["outcome"], step["warning"]) == (
            "applied",
            "the agent that the set brings could not be asked whether it would start: it is too old",
        )
        # The way back asks the agent of the set before, which starts.
        assert json.loads(serving.exec(["avocadoctl", "-o", "json", "rollback"]).stdout)["outcome"] == "applied"
    wait_until_serving(serving, SERVING_S)
    assert project.status(serving)["runtime"] == before["runtime"]


@contextlib.contextmanager
def on_top(
    project: Reference, tree: Path, more: str = "enable_services: [pose.service]", *, confirm_within_s: int = 60
) -> Iterator[None]:
    """The project with one more extension, over the others, that holds this tree."""
    path = project.folder / "avocado.yaml"
    good = path.read_text(encoding="utf-8")
    extension = textwrap.indent(f'spoiled:\n  version: "1"\n  overlay: "{tree}"\n  {more}\n', "  ")
    spoiled = good.replace("      - pose-config\n", "      - pose-config\n      - spoiled\n", 1)
    spoiled = spoiled.replace("\nextensions:\n", f"\nextensions:\n{extension}\n", 1)
    spoiled = spoiled.replace("\n  npu-pose:\n", f"\n  npu-pose:\n    confirm_within_s: {confirm_within_s}\n", 1)
    assert spoiled.count("spoiled") >= 2
    path.write_text(spoiled, encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(good, encoding="utf-8")


def library_with_a_hole(out: Path, scratch: Path) -> None:
    """A shared library that needs another one which the image does not bring."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler here; `make setup` installs one")
    out.parent.mkdir(parents=True, exist_ok=True)
    source = scratch / "empty.c"
    source.write_text("void nothing(void) {}\n", encoding="utf-8")
    needed = scratch / "libgone.so"
    subprocess.run(["cc", "-shared", "-o", needed, source, "-Wl,-soname,libgone.so"], check=True, timeout=30)
    line = ["cc", "-shared", "-o", out, source, "-Wl,--no-as-needed", needed]
    subprocess.run(line, check=True, timeout=30)

"""avocadoctl: where options may stand, how it fails, and what it does not import."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent import cli
from agent.contract.errors import ErrorCode, OperationError
from agent.ports.process import Finished
from agent.publish import write_status
from agent.verbs import client, remote
from agent.verbs.client import error_of_record
from agent.verbs.runtime import resolve
from tests.unit.test_status import document

TREE = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AVOCADO_RUN_DIR", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("words", [["-o", "json", "status"], ["status", "-o", "json"], ["status", "--output=json"]])
def test_global_options_stand_before_or_after_the_verb(
    run_dir: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_status(run_dir / "status.json", document())
    assert cli.main(words) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["target"] == "virtual"
    assert printed.err == ""


def test_an_error_is_two_lines_for_people_and_four_fields_for_machines(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["status"]) == 3
    assert capsys.readouterr().err == (
        "avocadoctl: cannot read the board's status: the agent has not run since the boot\n"
        "  try: See why: systemctl status avocadod\n"
    )
    assert cli.main(["status", "-o", "json"]) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert set(json.loads(printed.err)) == {"code", "message", "remedy", "facts"}


def test_what_others_wrote_into_a_message_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    cli.print_error(
        OperationError(ErrorCode.INTERNAL, "cannot \x1b[2J\r\u009b1A\u202e do it", "Say \x07 it."), as_json=False
    )
    assert capsys.readouterr().err == ("avocadoctl: cannot \\x1b[2J\\r\\x9b1A\\u202e do it\n  try: Say \\x07 it.\n")


def test_ext_list_and_runtime_list_read_the_same_document(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(run_dir / "status.json", document())
    assert cli.main(["ext", "list", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["merge_name"] == "98-pose-model"
    assert cli.main(["runtime", "list", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(("words", "said"), [([], None), (["--warm-up"], True), (["--no-warm-up"], False)])
@pytest.mark.parametrize(
    "verb",
    [
        "rollback",
        "runtime activate 3f2a",
        "runtime add --url https://updates.example.org",
        "ext enable pose-config",
        "ext disable pose-config",
    ],
)
def test_whether_a_model_is_tried_first_is_said_for_one_change_or_left_to_the_board(
    verb: str, words: list[str], said: bool | None, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(client, "run_change", lambda member, signature, body, as_json: asked.append(body[1]) or 0)
    runtime = {"name": "npu-pose", "version": "1", "id": "3f2a", "built_at": ""}
    write_status(run_dir / "status.json", document() | {"runtimes": [runtime]})
    assert cli.main([*verb.split(), *words]) == 0
    assert [{name: variant.value for name, variant in options.items()} for options in asked] == [
        {} if said is None else {"warm_up": said}
    ]


def test_another_host_gets_the_same_words_quoted_for_its_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(remote, "pass_through", lambda argv, hear: seen.append(list(argv)) or 6)
    assert cli.main(["-H", "root@board", "-o", "json", "runtime", "inspect", "a b;$(reboot)"]) == 6
    assert seen[0][:4] == ["ssh", "-T", "root@board", "--"]
    assert shlex.split(seen[0][4]) == ["avocadoctl", "-o", "json", "runtime", "inspect", "a b;$(reboot)"]


@pytest.mark.parametrize(("status", "code"), [(255, ErrorCode.SSH_FAILED), (127, ErrorCode.AGENT_UNREACHABLE)])
def test_what_ssh_itself_could_not_do_is_told_from_what_the_board_said(
    monkeypatch: pytest.MonkeyPatch, status: int, code: ErrorCode
) -> None:
    monkeypatch.setattr(remote, "pass_through", lambda argv, hear: status)
    with pytest.raises(OperationError) as caught:
        remote.run_there("root@board", ["status"])
    assert caught.value.code is code


@pytest.mark.parametrize("verb", ["merge", "unmerge", "refresh", "ext merge", "ext unmerge", "ext refresh"])
def test_whatever_may_take_sshd_s_configuration_away_is_asked_to_wait_for_its_host(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(remote, "pass_through", lambda argv, hear: seen.append(shlex.split(argv[-1])) or 0)
    assert cli.main(["-H", "root@board", *verb.split()]) == 0
    assert seen == [["avocadoctl", *verb.split(), "--await-host"]]


def test_a_verb_that_may_change_etc_comes_back_over_a_new_connection_when_the_board_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[str]] = []
    answers = [255, 0]  # the first connection is made too early
    confirmed = threading.Event()

    def confirm(argv: list[str], timeout_s: float) -> Finished:
        seen.append(argv)
        status = answers.pop(0)
        if status == 0:
            confirmed.set()
        return Finished(tuple(argv), status, b"", b"")

    def follow(argv: list[str], hear: Callable[[bytes], None]) -> int:
        seen.append(argv)
        for line in (b"noise\n", b"#7 start_services\n", b"#7 await_confirmation\n", b"#7 await_confirmation\n"):
            hear(line)
        assert confirmed.wait(10)
        return 0

    monkeypatch.setattr(remote, "pass_through", follow)
    monkeypatch.setattr(remote, "run", confirm)
    monkeypatch.setattr(remote, "_CONFIRM_EVERY_S", 0.01)
    assert cli.main(["-H", "root@board", "rollback"]) == 0
    assert [shlex.split(argv[-1]) for argv in seen] == [
        ["avocadoctl", "rollback", "--await-host"],
        ["avocadoctl", "confirm", "7"],
        ["avocadoctl", "confirm", "7"],
    ]
    assert "ControlMaster=no" in seen[1]
    assert "ControlMaster=no" not in seen[0]


def test_a_change_whose_connection_is_lost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(argv: list[str], hear: Callable[[bytes], None]) -> int:
        hear(b"#7 await_confirmation\n")
        return 255

    monkeypatch.setattr(remote, "pass_through", lose)
    monkeypatch.setattr(remote, "run", lambda argv, timeout_s: Finished(tuple(argv), 0, b"", b""))
    with pytest.raises(OperationError) as caught:
        remote.run_there("root@board", ["rollback"], comes_back=True)
    assert caught.value.message == "cannot follow change 7 on root@board: ssh failed"
    assert caught.value.remedy == "See how it ended: avocadoctl -H root@board history show 7"


@pytest.mark.parametrize(("status", "how"), [(255, "ssh failed"), (-9, "ssh was ended by signal 9")])
def test_a_connection_lost_before_the_board_waits_still_brings_the_host_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int, how: str
) -> None:
    asked: list[list[str]] = []
    answers = [(4, b""), (0, b'{"outcome": "running"}'), (0, b"")]  # it does not wait yet; it runs; it takes the word

    def ask(argv: list[str], timeout_s: float) -> Finished:
        asked.append(shlex.split(argv[-1]))
        found, out = answers.pop(0)
        return Finished(tuple(argv), found, out, b"")

    def lose(argv: list[str], hear: Callable[[bytes], None]) -> int:
        hear(b"#7 switch_overlay\n")
        return status

    monkeypatch.setattr(remote, "pass_through", lose)
    monkeypatch.setattr(remote, "run", ask)
    monkeypatch.setattr(remote, "_CONFIRM_EVERY_S", 0.01)
    with pytest.raises(OperationError) as caught:
        remote.run_there("root@board", ["rollback"], comes_back=True)
    confirm = ["avocadoctl", "confirm", "7"]
    assert asked == [confirm, ["avocadoctl", "-o", "json", "history", "show", "7"], confirm]
    assert caught.value.message == f"cannot follow change 7 on root@board: {how}"
    assert capsys.readouterr().err == (
        "the connection to root@board was lost; change 7 still runs: trying to come back\n"
    )


def test_whoever_presses_ctrl_c_is_told_that_the_change_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(argv: list[str], hear: Callable[[bytes], None]) -> int:
        hear(b"#7 switch_overlay\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(remote, "pass_through", interrupted)
    assert cli.main(["-H", "root@board", "rollback"]) == 130
    assert capsys.readouterr().err == (
        "avocadoctl: change 7 goes on on root@board without you\n"
        "  try: to end it: avocadoctl -H root@board cancel 7;"
        " how it ended: avocadoctl -H root@board history show 7\n"
    )


def test_nobody_comes_back_to_a_change_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [(4, b""), (0, b'{"outcome": "reverted"}')]

    def ask(argv: list[str], timeout_s: float) -> Finished:
        found, out = answers.pop(0)
        return Finished(tuple(argv), found, out, b"")

    def lose(argv: list[str], hear: Callable[[bytes], None]) -> int:
        hear(b"#7 undo switch_overlay\n")
        return 255

    monkeypatch.setattr(remote, "pass_through", lose)
    monkeypatch.setattr(remote, "run", ask)
    with pytest.raises(OperationError, match="cannot follow change 7 on root@board: ssh failed"):
        remote.run_there("root@board", ["rollback"], comes_back=True)
    assert answers == []


@pytest.mark.parametrize("host", ["-oProxyCommand=reboot", ""])
def test_a_host_that_ssh_would_take_for_an_option_is_refused(host: str) -> None:
    with pytest.raises(OperationError) as caught:
        remote.ssh_argv(host, ["true"])
    assert caught.value.code is ErrorCode.USAGE


def test_a_runtime_may_be_named_by_the_start_of_its_id() -> None:
    entries = [
        {**(document()["runtime"] or {}), "id": f"{start}-1111-4111-8111-111111111111"}
        for start in ("1aaaaaaa", "1bbbbbbb")
    ]
    made = document(runtimes=entries)
    assert resolve(made, "1b") == entries[1]["id"]
    with pytest.raises(OperationError, match="2 ids start so"):
        resolve(made, "1")
    with pytest.raises(OperationError, match="it is not on this board"):
        resolve(made, "2")


def test_a_change_that_did_not_do_what_was_asked_ends_with_its_reason() -> None:
    reason = {"code": "unhealthy", "message": "cannot keep it", "remedy": "Look."}
    error = error_of_record({"number": 4, "outcome": "reverted", "reason": reason})
    assert error is not None
    assert (error.code, error.exit_status, error.facts) == (ErrorCode.UNHEALTHY, 43, {"change": 4})
    assert error_of_record({"number": 4, "outcome": "applied", "reason": None}) is None


@pytest.mark.parametrize("verb", sorted(verb for verb, row in cli.VERBS.items() if row.on_board and verb != "receive"))
def test_every_help_shows_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([verb, "--help"])
    assert left.value.code == 0
    assert "avocadoctl" in capsys.readouterr().out.split("usage:", 1)[1].split("\n", 1)[1]


def test_status_imports_neither_the_bus_nor_models_nor_the_host(tmp_path: Path) -> None:
    write_status(tmp_path / "status.json", document())
    program = (
        "import sys; from agent.cli import main; assert main(['status', '-o', 'json']) == 0; "
        "bad = {'dbus_fast', 'pydantic', 'asyncio', 'aiohttp', 'tuf', 'agent.host', 'subprocess'} & set(sys.modules); "
        "sys.exit(' '.join(sorted(bad)) or 0)"
    )
    env = {"AVOCADO_RUN_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(TREE)}
    finished = subprocess.run(
        [sys.executable, "-c", program], env=env, cwd=TREE, capture_output=True, text=True, timeout=30
    )
    assert finished.returncode == 0, finished.stderr

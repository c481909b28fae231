"""Whatever the board's login shell or ssh itself says instead of our bytes is one clear message, or is passed over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent.contract.errors import ErrorCode, OperationError
from agent.host import ssh
from agent.host.deploy import carry
from agent.host.report import Report
from agent.host.ssh import Board, ask
from tests.ports.board_by_ssh import board_by_ssh, refused


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return board_by_ssh(tmp_path, monkeypatch)


SHELL_SAID = "cannot talk to avocadoctl on root@board: its shell printed 'This account is limited to git.'"
NOT_IN_PATH = "cannot run avocadoctl on root@board: it is not in the PATH of a non-interactive shell there"


@pytest.mark.parametrize(
    ("case", "code", "message"),
    [
        ("restricted", ErrorCode.HANDSHAKE_FAILED, SHELL_SAID),
        ("notfound", ErrorCode.HANDSHAKE_FAILED, NOT_IN_PATH),
        ("user", ErrorCode.SSH_FAILED, "cannot log in to root@board: permission denied"),
        ("hostkey", ErrorCode.SSH_FAILED, "cannot log in to root@board: its host key is not known"),
        (
            "unreachable",
            ErrorCode.SSH_FAILED,
            "cannot reach root@board: ssh: connect to host board port 22: No route to host",
        ),
    ],
)
def test_a_session_that_never_begins_is_one_clear_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, case: str, code: ErrorCode, message: str
) -> None:
    monkeypatch.setenv("CASE", case)
    for work in (ask(Board("root@board"), ["status"]), carry(Board("root@board"), folder, Report(quiet=True))):
        error = refused(work)
        assert (error.code, error.message) == (code, message)
        assert error.remedy


def test_a_login_shell_that_never_stops_talking_is_cut_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASE", "endless")
    error = refused(carry(Board("root@board"), folder, Report(quiet=True)))
    assert error.code is ErrorCode.HANDSHAKE_FAILED
    assert error.message.startswith("cannot talk to root@board: its login shell printed more than 65536 bytes: '...")
    assert refused(ask(Board("root@board"), ["status"])).code is ErrorCode.HANDSHAKE_FAILED


def test_a_login_shell_that_hangs_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASE", "slow")
    monkeypatch.setattr(ssh, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(ssh, "_STATUS_S", 0.3)
    monkeypatch.setattr(ssh, "_END_S", 0.2)
    for work in (ask(Board("root@board"), ["status"]), carry(Board("root@board"), folder, Report(quiet=True))):
        assert refused(work).message == "cannot talk to root@board: no answer in 0.3 s"


@pytest.mark.parametrize("case", ["none", "before", "json", "after", "status"])
def test_the_status_is_found_among_what_the_shell_prints(
    folder: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setenv("CASE", case)
    assert asyncio.run(ask(Board("root@board"), ["status"])) == {"target": "virtual"}
    assert "avocadoctl -o json status" in (folder.parent / "ssh.log").read_text()


@pytest.mark.parametrize("host", ["", "-oProxyCommand=id", "root@board id"])
def test_a_host_that_ssh_would_read_as_an_option_is_refused(host: str) -> None:
    with pytest.raises(OperationError, match=r"^cannot use .* as a host$"):
        Board(host)

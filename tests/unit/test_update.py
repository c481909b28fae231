"""avocadoctl update: what a board fetches by itself, and what it leaves to people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.contract.errors import ErrorCode, OperationError
from agent.verbs.update import held_back, read_config

NEW, OLD = "new", "old"


def change(outcome: str, **more: Any) -> dict[str, Any]:
    return {"number": 4, "kind": "deploy", "from_runtime": OLD, "to_runtime": NEW, "outcome": outcome, **more}


UNHEALTHY = {"code": "unhealthy", "message": "cannot prove pose.service healthy: OKS 0.2", "remedy": ""}
LOST = {"code": "fetch-timeout", "message": "cannot fetch x: 0 bytes arrived in 20 s", "remedy": ""}
SPOILT = {"code": "hash-mismatch", "message": "cannot use x: its bytes do not match", "remedy": ""}
ELSEWHERE = {"code": "fetch-redirected", "message": "cannot fetch x: the server redirects (302)", "remedy": ""}
POWER = {"code": "power-lost", "message": "cannot finish: power lost before activation", "remedy": ""}
BACK = {"from_runtime": NEW, "to_runtime": OLD}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([], ""),
        ([change("reverted", reason=LOST)], ""),
        ([change("reverted", reason=POWER)], ""),
        ([change("reverted", reason=SPOILT)], ""),
        ([change("reverted", reason=ELSEWHERE)], ""),
        ([change("planned")], ""),
        (
            [change("reverted", reason=UNHEALTHY)],
            "change #4 took it back (cannot prove pose.service healthy: OKS 0.2); to try again: avocadoctl update "
            "--again",
        ),
        (
            [change("reverted", reason=LOST), change("reverted", reason=UNHEALTHY, number=3)],
            "change #3 took it back (cannot prove pose.service healthy: OKS 0.2); to try again: avocadoctl update "
            "--again",
        ),
        (
            [change("stuck", reason=None)],
            "change #4 took it back (it has no reason); to try again: avocadoctl update --again",
        ),
        (
            [change("applied", kind="rollback", number=5, **BACK), change("applied")],
            "change #5 (rollback) went away from it; to go back: avocadoctl update --again",
        ),
        # Somebody has deployed it by hand since.
        ([change("applied", number=6), change("reverted", reason=UNHEALTHY)], ""),
        ([change("applied", to_runtime="another")], ""),
    ],
)
def test_what_a_board_has_tried_or_left_is_not_fetched_again(changes: list[dict[str, Any]], reason: str) -> None:
    assert held_back(NEW, changes) == reason


def test_the_address_comes_from_one_line(tmp_path: Path) -> None:
    path = tmp_path / "update.toml"
    path.write_text('repository = "https://updates.example.org/virtual"\n')
    assert read_config(path) == "https://updates.example.org/virtual"


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (None, ErrorCode.NOT_FOUND, "cannot update: {path} is not there"),
        ("", ErrorCode.BAD_CONFIG, "cannot read {path}: repository: an address is expected"),
        ("repository = 7", ErrorCode.BAD_CONFIG, "cannot read {path}: repository: an address is expected"),
        ('reposytory = "x"', ErrorCode.BAD_CONFIG, "cannot read {path}: reposytory: nobody knows this key"),
        ("[", ErrorCode.BAD_CONFIG, "cannot read {path}: "),
    ],
)
def test_a_configuration_that_says_nothing_is_named(
    tmp_path: Path, text: str | None, code: ErrorCode, message: str
) -> None:
    path = tmp_path / "update.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(OperationError) as error:
        read_config(path)
    assert error.value.code is code
    assert error.value.message.startswith(message.format(path=path))
    assert error.value.remedy

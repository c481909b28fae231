"""The error table is total and unambiguous, and an error survives the bus and JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agent.contract.errors import EXIT_STATUS, ErrorCode, OperationError, code_of_dbus_name, dbus_name


def test_every_code_has_an_exit_status_of_its_own_and_no_status_means_success_or_a_signal() -> None:
    assert set(EXIT_STATUS) == set(ErrorCode)
    assert len(set(EXIT_STATUS.values())) == len(EXIT_STATUS)
    # 126 and above are the shell's: not executable, not found, ended by a signal, and 255 is ssh's.
    assert all(1 <= status <= 125 for status in EXIT_STATUS.values())


def test_every_code_has_a_bus_name_of_its_own_that_leads_back_to_it() -> None:
    names = [dbus_name(code) for code in ErrorCode]
    assert len(set(names)) == len(names)
    assert [code_of_dbus_name(name) for name in names] == list(ErrorCode)
    assert dbus_name(ErrorCode.CHANGE_RUNNING) == "org.avocado.Error.ChangeRunning"
    assert code_of_dbus_name("org.freedesktop.DBus.Error.Failed") is ErrorCode.INTERNAL


@pytest.mark.parametrize("code", list(ErrorCode))
def test_an_error_is_the_same_after_json(code: ErrorCode) -> None:
    error = OperationError(code, "cannot do it: why", "Do this.", {"pid": 812})
    again = OperationError.from_dict(json.loads(json.dumps(error.as_dict())))
    assert (again.code, again.message, again.remedy, again.facts) == (code, error.message, error.remedy, error.facts)
    assert again.exit_status == EXIT_STATUS[code]


def test_a_code_of_a_newer_agent_becomes_internal_and_keeps_its_words() -> None:
    error = OperationError.from_dict({"code": "brand-new", "message": "cannot x", "remedy": "Try y."})
    assert (error.code, error.message, error.remedy) == (ErrorCode.INTERNAL, "cannot x", "Try y.")


def test_the_operations_page_lists_every_status() -> None:
    text = (Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8")
    listed = {code: int(status) for status, code in re.findall(r"^\| (\d+) \| `([a-z-]+)` \|", text, re.MULTILINE)}
    assert listed == {code.value: status for code, status in EXIT_STATUS.items()}

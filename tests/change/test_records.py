"""A change's record, and the journal's files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.change.journal import Journal
from agent.change.record import ChangeRecord, Outcome, parse_record
from agent.contract.errors import ErrorCode, OperationError
from agent.ports.files import write_durably
from tests.change.stories import R1, R2, board, deploy
from tests.change.wired import run


def test_a_record_reads_back_as_it_was_written() -> None:
    record = run(board(R1), deploy(R2)())
    assert parse_record(record.as_bytes()) == record


def test_keys_of_a_later_version_are_ignored_and_a_newer_schema_is_refused() -> None:
    document = run(board(R1), deploy(R2)()).as_dict()
    assert parse_record(json.dumps(document | {"mood": "good"}).encode()).number == 1
    with pytest.raises(OperationError) as caught:
        parse_record(json.dumps(document | {"schema": 2}).encode())
    assert caught.value.code is ErrorCode.NEWER_SCHEMA
    assert caught.value.message == "cannot read the change record: schema 2, this agent reads 1"


@pytest.fixture
def journal(tmp_path) -> Journal:
    return Journal(tmp_path / "changes", write_durably)


def test_numbers_only_grow_and_strangers_are_left_alone(journal: Journal) -> None:
    assert (journal.next_number(), journal.newest()) == (1, None)
    record = run(board(R1), deploy(R2)())
    journal.save(record)
    (journal.folder / ".2.json.tmp").write_text("half")
    (journal.folder / "notes.txt").write_text("mine")
    assert (journal.numbers(), journal.next_number(), journal.newest()) == ([1], 2, record)


def plain_record(number: int, outcome: Outcome, **changed: Any) -> ChangeRecord:
    return ChangeRecord(number, "deploy", "boot-1", "root", None, R1.id, (), "", outcome=outcome, **changed)


def test_old_records_go_but_for_those_that_still_say_something(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.change.journal.KEPT", 3)
    journal.save(plain_record(1, Outcome.APPLIED, committed=True))
    journal.save(plain_record(2, Outcome.RUNNING))
    journal.save(plain_record(3, Outcome.APPLIED, committed=True))
    (journal.folder / "4.json").write_text("{")
    for number, outcome in ((5, Outcome.REVERTED), (6, Outcome.PLANNED), (7, Outcome.PLANNED), (8, Outcome.PLANNED)):
        journal.save(plain_record(number, outcome))
    journal.prune()
    assert journal.numbers() == [2, 3, 4, 6, 7, 8]  # 3 says what the board was left as
    assert [record.number for record in journal.changes()] == [3, 2]
    journal.save(plain_record(9, Outcome.APPLIED, committed=True))
    journal.prune()
    assert journal.numbers() == [2, 4, 7, 8, 9]
    assert journal.next_number() == 10


def test_a_damaged_record_does_not_hide_the_others(journal: Journal) -> None:
    record = run(board(R1), deploy(R2)())
    journal.save(record)
    (journal.folder / "2.json").write_bytes(b"\0" * 100)
    records, unreadable = journal.history()
    assert records == [record]
    assert [error.remedy for error in unreadable] == [f"Move {journal.folder / '2.json'} out of the folder."]
    with pytest.raises(OperationError, match="of change 2"):
        journal.newest()


def test_a_change_nobody_recorded_is_not_found(journal: Journal) -> None:
    with pytest.raises(OperationError) as caught:
        journal.load(7)
    assert (caught.value.code, caught.value.message) == (ErrorCode.NOT_FOUND, "cannot find change 7")

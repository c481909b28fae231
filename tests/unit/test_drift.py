"""What the journal says of the board, beside the board itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agent.change.record import ChangeRecord, Outcome
from agent.drift import Left

MODEL = "movenet-lightning 4.1"


def record(number: int, to: str, **changes: Any) -> ChangeRecord:
    made = ChangeRecord(
        number=number,
        kind="deploy",
        boot_id="b",
        requested_by="root",
        from_runtime="a",
        to_runtime=to,
        steps=(),
        started_at="",
        outcome=Outcome.APPLIED,
        committed=True,
        facts={"model": MODEL},
    )
    return replace(made, **changes)


def test_a_board_as_it_was_left_has_no_problem() -> None:
    left = Left()
    assert left.differences("anything", MODEL) == []
    left.start([record(3, "c", outcome=Outcome.REVERTED, committed=False), record(2, "b"), record(1, "a")])
    assert left.differences("b", MODEL) == left.differences("b", "") == []


def test_an_edited_link_and_another_model_are_named_with_what_was_left() -> None:
    left = Left()
    left.start([record(2, "b")])
    (edited,) = left.differences("a", MODEL)
    assert edited.message == "the board boots runtime a, but change 2 left b"
    assert edited.remedy.startswith("Go back with 'avocadoctl runtime activate b'")
    (other,) = left.differences("b", "movenet-lightning 4.0")
    assert other.message == "model movenet-lightning 4.0 answers, but change 2 proved movenet-lightning 4.1"


def test_the_next_committed_change_is_what_counts() -> None:
    left = Left()
    left.start([record(2, "b")])
    left.note(record(3, "c", outcome=Outcome.RUNNING))
    assert left.differences("b", MODEL) == []
    left.note(record(3, "c"))
    assert left.differences("c", MODEL) == []

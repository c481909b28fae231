"""Every attack of tests/hostile/cases is carried out, refused, and leaves the board as it was."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agent.contract.errors import ErrorCode
from tests.hostile.board import Stage
from tests.hostile.case import judge
from tests.hostile.cases import FAMILIES
from tests.hostile.server import Server
from tests.hostile.table import CLAUSES, table

ROOT = Path(__file__).parents[2]
LEAST = 60
# How the codes begin that say a repository is refused.
REFUSALS = ("metadata", "fetch", "delta", "delegation", "not-delegated", "root", "repository")
NAMED = [(family, name) for family, cases in FAMILIES.items() for name in cases]


@pytest.mark.parametrize(("family", "name"), NAMED, ids=[": ".join(pair) for pair in NAMED])
def test_the_attack_is_refused_and_the_board_stays_as_it_was(
    stage: Stage, server: Server, family: str, name: str
) -> None:
    judge(stage, FAMILIES[family][name])


def test_there_are_enough_attacks_and_no_two_have_one_name() -> None:
    assert len({name for _, name in NAMED}) == len(NAMED) >= LEAST


def test_every_refusal_of_the_error_table_has_an_attack_that_meets_it() -> None:
    met = {case.code for cases in FAMILIES.values() for case in cases.values()}
    # Met elsewhere: a damaged board, a base that rotted, a disk that is full.
    elsewhere = {ErrorCode.TRUST_STATE_DAMAGED, ErrorCode.DELTA_WRONG_BASE, ErrorCode.NO_SPACE}
    named = {code for code in ErrorCode if code.value.startswith(REFUSALS)}
    assert named - elsewhere <= met


def test_whoever_attacks_is_one_of_whom_the_threat_model_names() -> None:
    named = set(re.findall(r"^\| \*\*([a-z ]+)\*\* \|", (ROOT / "docs/threat-model.md").read_text(), re.MULTILINE))
    assert {case.by for cases in FAMILIES.values() for case in cases.values()} <= named


def test_every_attack_the_threat_model_names_is_carried_out() -> None:
    """A name in italics stands alone, for an attack, or after the test file that shows it."""
    rows = [row for row in (ROOT / "docs/threat-model.md").read_text().splitlines() if row.count("|") == 4]
    cells = [row.split("|")[3] for row in rows]
    parts = [part.strip() for cell in cells for part in cell.split(";")]
    named = {name for part in parts if part.startswith("*") for name in re.findall(r"\*((?:[^*\\]|\\\*)+)\*", part)}
    assert {name.replace("\\*", "*") for name in named} - {name for _, name in NAMED} == set()


def test_every_clause_of_the_client_s_workflow_has_a_case() -> None:
    assert {case.clause for cases in FAMILIES.values() for case in cases.values() if case.clause} == set(CLAUSES)


def test_the_documented_table_is_the_one_the_cases_make() -> None:
    assert (ROOT / "docs/attacks.md").read_text(encoding="utf-8") == table()

"""Which agent runs and which is merged."""

from __future__ import annotations

from typing import Any

import pytest

from agent.contract.errors import ErrorCode, OperationError
from agent.extensions import Kind, MergedSet
from agent.itself import agent_problems, newer_agent, started_from
from tests.change.sets import runtime

R1, R3 = runtime("1"), runtime("3", avocado_agent="3")
OLD, NEW = (next(e.image_id for e in m.extensions if e.name == "avocado-agent") for m in (R1, R3))


def merged(image: str) -> MergedSet:
    links = {"95-avocado-agent": image, "96-npu-virtual": "x"}
    return MergedSet({Kind.SYSEXT: tuple(links)}, images={Kind.SYSEXT: links})


@pytest.mark.parametrize(
    ("running", "there", "newer"),
    [
        (OLD, merged(OLD), ""),
        (OLD, merged(NEW), "3"),
        (OLD, merged("elsewhere"), "of another build"),
        (None, merged(NEW), ""),  # of the base
        (OLD, MergedSet({Kind.SYSEXT: ("95-avocado-agent",)}), ""),  # nobody knows which image it is
    ],
)
def test_the_merged_agent_is_newer_where_it_is_another_image(running: str | None, there: MergedSet, newer: str) -> None:
    assert newer_agent(running, there, [R1, R3]) == newer


def test_the_problem_says_what_to_type() -> None:
    assert agent_problems("") == []
    assert agent_problems("3")[0]["remedy"] == "Run: systemctl restart avocadod"


def test_an_agent_that_cannot_ask_what_is_merged_starts_all_the_same() -> None:
    class Overlay:
        def merged(self) -> MergedSet:
            raise OperationError(ErrorCode.SWITCH_FAILED, "cannot read")

    overlay: Any = Overlay()
    assert started_from(overlay) is None

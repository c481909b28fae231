"""Following a change over an agent that ends on the way: it is waited for, and the change is never lost sight of."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent.contract.errors import ErrorCode, OperationError
from agent.verbs import client as module
from agent.verbs.client import AgentClient, Record

CHANGE = "/org/avocado/Agent1/change/7"
RUNNING: Record = {"number": 7, "outcome": "running"}
REVERTED: Record = {"number": 7, "outcome": "reverted"}
GONE = OperationError(ErrorCode.AGENT_UNREACHABLE, "cannot reach the agent: nobody owns org.avocado.Agent1")
UNREAD = OperationError(ErrorCode.NOT_FOUND, "cannot find that change: it neither runs nor is the one that ran last")


class Answers(AgentClient):
    """An agent that answers as the test says; the last answer stays."""

    def __init__(self, *answers: Record | OperationError) -> None:
        bus: Any = None
        super().__init__(bus)
        self._answers = list(answers)
        self.asked: list[str] = []

    async def call(self, member: str, *args: Any, **where: Any) -> list[Any]:
        self.asked.append(member)
        raise GONE  # gone again at once, or refused: the change has ended all the same

    async def record(self, change: str) -> Record:
        assert change == CHANGE
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, OperationError):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_AGAIN_S", 0.001)


def follow(*answers: Record | OperationError) -> tuple[Record, list[Record]]:
    told: list[Record] = []
    return asyncio.run(Answers(*answers).follow(CHANGE, told.append)), told


def test_an_agent_that_comes_back_says_how_the_change_ended() -> None:
    record, told = follow(RUNNING, GONE, GONE, UNREAD, RUNNING, REVERTED)
    assert record == REVERTED
    assert told == [RUNNING, RUNNING, REVERTED]


def test_an_agent_that_ends_before_it_was_first_asked_is_waited_for_too() -> None:
    assert follow(GONE, UNREAD, REVERTED) == (REVERTED, [REVERTED])


def test_an_agent_that_stays_away_leaves_the_number_and_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BACK_WITHIN_S", 0.02)
    with pytest.raises(OperationError) as caught:
        follow(RUNNING, GONE)
    assert (caught.value.code, caught.value.message, caught.value.remedy) == (
        ErrorCode.AGENT_UNREACHABLE,
        "cannot follow change 7: the agent went away and said nothing of it for 0.02 s",
        "See how it ended: avocadoctl history show 7",
    )


def test_a_change_that_was_never_there_is_not_waited_for() -> None:
    with pytest.raises(OperationError, match="it neither runs nor is the one that ran last"):
        follow(UNREAD)


def test_the_status_is_written_anew_before_anybody_reads_it() -> None:
    client = Answers(RUNNING, REVERTED)
    assert asyncio.run(client.follow(CHANGE, lambda record: None)) == REVERTED
    assert client.asked == ["Describe"]


def test_whoever_stops_watching_on_the_board_is_told_that_the_change_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(Answers):
        @classmethod
        async def connect(cls) -> AgentClient:
            return cls({**RUNNING, "steps": []})

        async def subscribe(self) -> None: ...

        async def call(self, member: str, *args: Any, **where: Any) -> list[Any]:
            return [CHANGE]

        async def news(self) -> None:
            raise asyncio.CancelledError  # as asyncio.run hands a Ctrl-C to what it runs

        def close(self) -> None: ...

    monkeypatch.setattr(module, "AgentClient", Interrupted)
    with pytest.raises(asyncio.CancelledError):
        module.run_change("Rollback", "", [], as_json=False)
    assert capsys.readouterr().err == (
        "avocadoctl: change 7 goes on without you\n"
        "  try: to end it: avocadoctl cancel 7; how it ended: avocadoctl history show 7\n"
    )

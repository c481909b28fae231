"""The watchdog's policy as a table: a life, an event, and what must follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inference.policy import (
    Action,
    Answered,
    Ended,
    Event,
    Failed,
    GoldenPassed,
    Life,
    Phase,
    Ready,
    Reason,
    ResetDone,
    Rules,
    Rung,
    SoftMissed,
    Tick,
    Unkillable,
    Wanted,
    decide,
)

NOW = 100.0
RULES = Rules(
    golden_passes=2,
    slow_limit=3,
    backoff_s=1.0,
    backoff_max_s=5.0,
    give_up_after=4,
    healthy_s=10.0,
    settle_s=0.25,
    contexts=1,
    reset_s=20.0,
    quarantine_s=30.0,
    idle_close_s=60.0,
)
LADDER = replace(RULES, ladder=((Rung.REBIND, 2), (Rung.RELOAD_MODULE, 0), (Rung.REBOOT, 1)))

WAITING = Life(phase=Phase.BACKING_OFF, retry_at=NOW)
STARTING = Life(phase=Phase.STARTING)
PROVING = Life(phase=Phase.PROVING, golden_left=2)
ALMOST = Life(phase=Phase.PROVING, golden_left=1)
SERVING = Life(phase=Phase.SERVING, reason=Reason.OK, since=NOW - 1, used_at=NOW - 1)
SLOW = Life(phase=Phase.PROVING, reason=Reason.SLOW, golden_left=1)
ENDING = Life(phase=Phase.ENDING, reason=Reason.HUNG, failures=1)
STUCK = Life(phase=Phase.QUARANTINED, reason=Reason.QUARANTINED, failures=1, since=NOW - 1)
CLOSED = Life(phase=Phase.IDLE, reason=Reason.IDLE)
REBINDING = Life(phase=Phase.RESETTING, reason=Reason.HUNG, failures=4, rung=Rung.REBIND, retry_at=NOW + 20)
REBOOTING = replace(REBINDING, rung=Rung.REBOOT, failures=6)
OVER = Life(phase=Phase.GAVE_UP, reason=Reason.HUNG, failures=4)

TABLE: list[tuple[str, Life, Event, Action, dict[str, object]]] = [
    ("a fresh life starts at the first tick", Life(), Tick(), Action.START, {"phase": Phase.STARTING}),
    ("a pause is kept", replace(WAITING, retry_at=NOW + 1), Tick(), Action.KEEP, {"phase": Phase.BACKING_OFF}),
    ("a pause that is over ends", WAITING, Tick(), Action.START, {"phase": Phase.STARTING}),
    ("a prepared worker is put to the proof", STARTING, Ready(), Action.PROVE, {"golden_left": 2}),
    ("one golden frame is not enough", PROVING, GoldenPassed(), Action.PROVE, {"phase": Phase.PROVING}),
    ("the last golden frame lets it serve", ALMOST, GoldenPassed(), Action.SERVE, {"reason": Reason.OK, "since": NOW}),
    ("a periodic golden frame changes nothing", SERVING, GoldenPassed(), Action.KEEP, {"phase": Phase.SERVING}),
    ("a late frame goes to the CPU as well", SERVING, SoftMissed(), Action.ASK_CPU, {"soft_misses": 1}),
    ("an answer forgives late ones", replace(SERVING, soft_misses=2), Answered(), Action.KEEP, {"soft_misses": 0}),
    (
        "late too often in a row is slow: no frames, but no new worker either",
        replace(SERVING, soft_misses=2),
        SoftMissed(),
        Action.DEMOTE,
        {"phase": Phase.PROVING, "reason": Reason.SLOW, "failures": 0, "golden_left": 2},
    ),
    ("a slow one must be on time every time", SLOW, GoldenPassed(late=True), Action.KEEP, {"golden_left": 2}),
    ("a slow one that is on time serves again", SLOW, GoldenPassed(), Action.SERVE, {"reason": Reason.OK}),
    (
        "one that stays slow is replaced",
        replace(SLOW, soft_misses=29),
        GoldenPassed(late=True),
        Action.REPLACE,
        {"phase": Phase.ENDING, "reason": Reason.SLOW, "failures": 1},
    ),
    ("a fresh one may be late while it proves itself", ALMOST, GoldenPassed(late=True), Action.SERVE, {}),
    (
        "a hang replaces the worker",
        SERVING,
        Failed(Reason.HUNG),
        Action.REPLACE,
        {"reason": Reason.HUNG, "failures": 1},
    ),
    ("a failed proof replaces it", PROVING, Failed(Reason.WRONG_RESULT), Action.REPLACE, {"phase": Phase.ENDING}),
    ("a refusal replaces it", STARTING, Failed(Reason.REFUSED), Action.REPLACE, {"reason": Reason.REFUSED}),
    (
        "failures add up while it does not serve for long",
        replace(SERVING, failures=2),
        Failed(Reason.ERROR),
        Action.REPLACE,
        {"failures": 3},
    ),
    (
        "good service wipes the record",
        replace(SERVING, failures=2, since=NOW - 10),
        Failed(Reason.ERROR),
        Action.REPLACE,
        {"failures": 1},
    ),
    ("a tick wipes it too", replace(SERVING, failures=2, since=NOW - 10), Tick(), Action.KEEP, {"failures": 0}),
    ("nothing starts while the old worker lives", ENDING, Tick(), Action.KEEP, {"phase": Phase.ENDING}),
    (
        "after a first failure only the device's own recovery is waited for",
        ENDING,
        Ended(),
        Action.KEEP,
        {"phase": Phase.BACKING_OFF, "retry_at": NOW + 0.25},
    ),
    ("the second failure pauses", replace(ENDING, failures=2), Ended(), Action.KEEP, {"retry_at": NOW + 1.25}),
    ("the third pauses twice as long", replace(ENDING, failures=3), Ended(), Action.KEEP, {"retry_at": NOW + 2.25}),
    ("the fourth is the last", replace(ENDING, failures=4), Ended(), Action.GIVE_UP, {"phase": Phase.GAVE_UP}),
    (
        "a busy device is asked for ever, at the longest pause",
        replace(ENDING, failures=9, reason=Reason.BUSY),
        Ended(),
        Action.KEEP,
        {"phase": Phase.BACKING_OFF, "retry_at": NOW + 5.25},
    ),
    (
        "an unplugged device may come back",
        replace(ENDING, failures=9, reason=Reason.DEVICE_GONE),
        Ended(),
        Action.KEEP,
        {"phase": Phase.BACKING_OFF},
    ),
    (
        "a wrong file is not read again",
        replace(ENDING, reason=Reason.BAD_MODEL, permanent=True),
        Ended(),
        Action.GIVE_UP,
        {"phase": Phase.GAVE_UP, "reason": Reason.BAD_MODEL},
    ),
    ("a worker that will not die keeps the device", ENDING, Unkillable(1), Action.QUARANTINE, {"phase": STUCK.phase}),
    ("quarantine waits", STUCK, Tick(), Action.KEEP, {"phase": Phase.QUARANTINED}),
    ("quarantine ends with the worker", STUCK, Ended(), Action.KEEP, {"phase": Phase.BACKING_OFF}),
    ("given up is given up", OVER, Tick(), Action.KEEP, {"phase": Phase.GAVE_UP}),
    ("a straggler's death changes nothing", SERVING, Ended(), Action.KEEP, {"phase": Phase.SERVING}),
    ("a second failure of one worker counts once", ENDING, Failed(Reason.CRASHED), Action.KEEP, {"failures": 1}),
    ("an answer of a dying worker changes nothing", ENDING, Answered(), Action.KEEP, {"phase": Phase.ENDING}),
    ("an answer is use", SERVING, Answered(), Action.KEEP, {"used_at": NOW}),
    ("unused for less than the limit stays open", replace(SERVING, used_at=NOW - 59), Tick(), Action.KEEP, {}),
    (
        "unused for long is closed",
        replace(SERVING, used_at=NOW - 60),
        Tick(),
        Action.CLOSE,
        {"phase": Phase.ENDING, "reason": Reason.IDLE},
    ),
    (
        "closed means that nothing is started",
        replace(CLOSED, phase=Phase.ENDING),
        Ended(),
        Action.KEEP,
        {"phase": CLOSED.phase},
    ),
    ("a closed one stays closed", CLOSED, Tick(), Action.KEEP, {"phase": Phase.IDLE}),
    ("a frame opens it", CLOSED, Wanted(), Action.START, {"phase": Phase.STARTING, "reason": Reason.IDLE}),
    ("a frame means nothing to one that serves", SERVING, Wanted(), Action.KEEP, {"phase": Phase.SERVING}),
    (
        "a rung that was climbed is followed by a worker",
        REBINDING,
        ResetDone(True),
        Action.KEEP,
        {"retry_at": NOW + 0.25},
    ),
    ("one that was refused too", REBINDING, ResetDone(False), Action.KEEP, {"phase": Phase.BACKING_OFF}),
    ("a rung is waited for", REBINDING, Tick(), Action.KEEP, {"phase": Phase.RESETTING}),
    (
        "but not for ever",
        replace(REBINDING, retry_at=NOW),
        Tick(),
        Action.KEEP,
        {"phase": Phase.BACKING_OFF},
    ),
    ("a refused reboot is the end", REBOOTING, ResetDone(False), Action.GIVE_UP, {"phase": Phase.GAVE_UP}),
    ("quarantine without a ladder waits for ever", replace(STUCK, since=0.0), Tick(), Action.KEEP, {"rung": None}),
]

# The same, with rungs beyond new workers.
CLIMBING: list[tuple[str, Life, Event, Action, dict[str, object]]] = [
    ("workers come first", replace(ENDING, failures=3), Ended(), Action.KEEP, {"phase": Phase.BACKING_OFF}),
    (
        "then the first rung",
        replace(ENDING, failures=4),
        Ended(),
        Action.RESET,
        {"phase": Phase.RESETTING, "rung": Rung.REBIND, "retry_at": NOW + 20},
    ),
    ("as often as it may be used", replace(ENDING, failures=5), Ended(), Action.RESET, {"rung": Rung.REBIND}),
    (
        "then the next that may be used at all",
        replace(ENDING, failures=6),
        Ended(),
        Action.RESET,
        {"rung": Rung.REBOOT},
    ),
    ("then nothing is left", replace(ENDING, failures=7), Ended(), Action.GIVE_UP, {"phase": Phase.GAVE_UP}),
    (
        "nothing is reset under somebody else's hands",
        replace(ENDING, failures=9, reason=Reason.BUSY),
        Ended(),
        Action.KEEP,
        {"phase": Phase.BACKING_OFF},
    ),
    (
        "good service begins the ladder anew",
        replace(SERVING, failures=6, rung=Rung.REBIND, since=NOW - 10),
        Tick(),
        Action.KEEP,
        {"failures": 0, "rung": None},
    ),
    ("quarantine is patient", replace(STUCK, since=NOW - 29), Tick(), Action.KEEP, {"rung": None}),
    (
        "only a reboot ends a process that hangs in the kernel",
        replace(STUCK, since=NOW - 30),
        Tick(),
        Action.RESET,
        {"phase": Phase.QUARANTINED, "rung": Rung.REBOOT},
    ),
    ("which is asked for once", replace(STUCK, since=0.0, rung=Rung.REBOOT), Tick(), Action.KEEP, {}),
    (
        "and when it is refused, quarantine goes on",
        replace(STUCK, rung=Rung.REBOOT),
        ResetDone(False),
        Action.KEEP,
        {"phase": Phase.QUARANTINED},
    ),
]


@pytest.mark.parametrize(
    ("life", "event", "action", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_policy(life: Life, event: Event, action: Action, expected: dict[str, object]) -> None:
    after, decided = decide(life, event, NOW, RULES)
    assert decided is action
    assert {name: getattr(after, name) for name in expected} == expected


def test_with_a_second_context_an_unkillable_worker_does_not_keep_the_device() -> None:
    rules = replace(RULES, contexts=2)
    after, action = decide(ENDING, Unkillable(1), NOW, rules)
    assert (after.phase, action) == (Phase.BACKING_OFF, Action.KEEP)
    after, action = decide(ENDING, Unkillable(2), NOW, rules)
    assert (after.phase, action) == (Phase.QUARANTINED, Action.QUARANTINE)


def test_an_hour_of_failures_does_not_overflow_the_pause() -> None:
    life = replace(ENDING, failures=100_000, reason=Reason.BUSY)
    after, _ = decide(life, Ended(), NOW, RULES)
    assert after.retry_at == NOW + 0.25 + 5.0


@pytest.mark.parametrize(
    ("life", "event", "action", "expected"), [row[1:] for row in CLIMBING], ids=[row[0] for row in CLIMBING]
)
def test_policy_with_a_ladder(life: Life, event: Event, action: Action, expected: dict[str, object]) -> None:
    after, decided = decide(life, event, NOW, LADDER)
    assert decided is action
    assert {name: getattr(after, name) for name in expected} == expected

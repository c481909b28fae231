"""When a worker is kept, helped out, replaced, retried or given up: one pure function over one backend's life.

`decide(life, event, now, rules)` returns the next life and the one action the supervisor must take. It knows no clock,
no process and no frame; `now` is monotonic seconds. The CPU standby lives by the same rules as the NPU. Values of the
enums are the strings on the bus, in metrics and in JSON.

    backing-off -> starting -> proving <-> serving
         ^            |           |          |    any failure: the worker is killed
         +--- ending <+-----------+----------+
                | \\-> gave-up      its file is wrong, or it failed too often in a row
                +--> quarantined    it will not die; back to backing-off when it does

A worker that is merely slow is not killed, since a fresh one may have to compile for minutes: it gets no frames until
it is on time with golden frames again, and is replaced only if that takes long.
Two workers hold the device at once only where the rules grant more than one context.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never


class Backend(StrEnum):
    """Who answers."""

    NPU = "npu"
    CPU = "cpu"
    NONE = "none"


class Reason(StrEnum):
    """Why that backend answers; anything but `ok` and `no-npu` is what became of the NPU."""

    OK = "ok"
    NO_NPU = "no-npu"
    STARTING = "starting"
    HUNG = "hung"
    SLOW = "slow"
    CRASHED = "crashed"
    ERROR = "error"
    WRONG_RESULT = "wrong-result"
    REFUSED = "refused"
    BUSY = "busy"
    DEVICE_GONE = "device-gone"
    BAD_MODEL = "bad-model"
    QUARANTINED = "quarantined"


class Phase(StrEnum):
    """Where in its life a backend is."""

    STARTING = "starting"
    PROVING = "proving"
    SERVING = "serving"
    ENDING = "ending"
    BACKING_OFF = "backing-off"
    QUARANTINED = "quarantined"
    GAVE_UP = "gave-up"


class Action(StrEnum):
    """What the supervisor must do now."""

    KEEP = "keep"
    ASK_CPU = "ask-cpu"
    DEMOTE = "demote"
    START = "start"
    PROVE = "prove"
    SERVE = "serve"
    REPLACE = "replace"
    QUARANTINE = "quarantine"
    GIVE_UP = "give-up"


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits of one backend, from the accelerator profile."""

    golden_passes: int = 3
    slow_limit: int = 5
    backoff_s: float = 0.5
    backoff_max_s: float = 60.0
    give_up_after: int = 8
    healthy_s: float = 10.0
    settle_s: float = 0.0
    contexts: int = 1


@dataclass(frozen=True, slots=True)
class Life:
    """One backend's state. `reason` is why it does not serve, or `ok`."""

    phase: Phase = Phase.BACKING_OFF
    reason: Reason = Reason.STARTING
    failures: int = 0
    soft_misses: int = 0
    golden_left: int = 0
    since: float = 0.0
    retry_at: float = 0.0
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has its model prepared."""


@dataclass(frozen=True, slots=True)
class GoldenPassed:
    """The golden frame came back right, in time or late."""

    late: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """A frame came back before its soft deadline."""


@dataclass(frozen=True, slots=True)
class SoftMissed:
    """A frame missed its soft deadline."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Hard deadline, crash, error, refusal or wrong golden frame. `permanent`: another try reads the same file."""

    reason: Reason
    permanent: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """The killed worker is dead and reaped."""


@dataclass(frozen=True, slots=True)
class Unkillable:
    """The killed worker is still there after its bound; `holders` counts such workers, this one included."""

    holders: int


Event = Tick | Ready | GoldenPassed | Answered | SoftMissed | Failed | Ended | Unkillable

# Late golden frames, as a multiple of the late frames that made it slow, before a fresh worker is tried.
_PATIENCE_WITH_SLOW = 10
# Trying again costs the device nothing while somebody else has it, or while it is unplugged.
_NEVER_GIVE_UP = frozenset({Reason.BUSY, Reason.DEVICE_GONE})


def decide(life: Life, event: Event, now: float, rules: Rules) -> tuple[Life, Action]:
    """The next life and what to do; an event that does not fit the phase changes nothing."""
    match event:
        case Tick():
            return _tick(life, now, rules)
        case Ready() if life.phase is Phase.STARTING:
            return replace(life, phase=Phase.PROVING, golden_left=rules.golden_passes, soft_misses=0), Action.PROVE
        case GoldenPassed() if life.phase is Phase.PROVING:
            if event.late and life.reason is Reason.SLOW:
                return _still_slow(life, rules)
            left = life.golden_left - 1
            if left > 0:
                return replace(life, golden_left=left), Action.PROVE
            return replace(life, phase=Phase.SERVING, reason=Reason.OK, soft_misses=0, since=now), Action.SERVE
        case Answered() if life.phase is Phase.SERVING:
            return replace(life, soft_misses=0), Action.KEEP
        case SoftMissed() if life.phase is Phase.SERVING:
            misses = life.soft_misses + 1
            if misses < rules.slow_limit:
                return replace(life, soft_misses=misses), Action.ASK_CPU
            demoted = replace(life, phase=Phase.PROVING, reason=Reason.SLOW, golden_left=rules.golden_passes)
            return replace(demoted, soft_misses=0), Action.DEMOTE
        case Failed() if life.phase in (Phase.STARTING, Phase.PROVING, Phase.SERVING):
            return _fail(life, event, now, rules)
        case Ended() if life.phase in (Phase.ENDING, Phase.QUARANTINED):
            return _next_try(life, now, rules)
        case Unkillable() if life.phase is Phase.ENDING:
            if event.holders < rules.contexts:
                return _next_try(life, now, rules)
            return replace(life, phase=Phase.QUARANTINED, reason=Reason.QUARANTINED), Action.QUARANTINE
        case Ready() | GoldenPassed() | Answered() | SoftMissed() | Failed() | Ended() | Unkillable():
            return life, Action.KEEP
        case _:
            assert_never(event)


def _tick(life: Life, now: float, rules: Rules) -> tuple[Life, Action]:
    if life.phase is Phase.BACKING_OFF and now >= life.retry_at:
        return replace(life, phase=Phase.STARTING), Action.START
    if life.phase is Phase.SERVING and life.failures and now - life.since >= rules.healthy_s:
        return replace(life, failures=0), Action.KEEP
    return life, Action.KEEP


def _still_slow(life: Life, rules: Rules) -> tuple[Life, Action]:
    misses = life.soft_misses + 1
    if misses >= rules.slow_limit * _PATIENCE_WITH_SLOW:
        failed = replace(life, phase=Phase.ENDING, failures=life.failures + 1)
        return failed, Action.REPLACE
    return replace(life, soft_misses=misses, golden_left=rules.golden_passes), Action.KEEP


def _fail(life: Life, event: Failed, now: float, rules: Rules) -> tuple[Life, Action]:
    # A worker that served well for long starts its record anew, even if no tick came in between.
    served_well = life.phase is Phase.SERVING and now - life.since >= rules.healthy_s
    failures = 1 if served_well else life.failures + 1
    failed = replace(life, phase=Phase.ENDING, reason=event.reason, failures=failures, permanent=event.permanent)
    return failed, Action.REPLACE


def _next_try(life: Life, now: float, rules: Rules) -> tuple[Life, Action]:
    hopeless = life.failures >= rules.give_up_after and life.reason not in _NEVER_GIVE_UP
    if life.permanent or hopeless:
        return replace(life, phase=Phase.GAVE_UP), Action.GIVE_UP
    # The first failure is retried at once; after that the pause doubles.
    pause = min(rules.backoff_max_s, rules.backoff_s * 2 ** min(life.failures - 2, 30)) if life.failures > 1 else 0.0
    return replace(life, phase=Phase.BACKING_OFF, retry_at=now + rules.settle_s + pause), Action.KEEP

"""When a worker is kept, helped out, replaced, retried or given up: one pure function over one backend's life.

`decide(life, event, now, rules)` returns the next life and the one action the supervisor must take. It knows no clock,
no process and no frame; `now` is monotonic seconds. The CPU standby lives by the same rules as the NPU. Values of the
enums are the strings on the bus, in metrics and in JSON.

    backing-off -> starting -> proving <-> serving
         ^            |           |          |    any failure: the worker is killed
         +--- ending <+-----------+----------+
                | \\-> gave-up      its file is wrong, or every rung of the ladder failed
                +--> quarantined    it will not die; back to backing-off when it does
                +--> resetting      fresh workers did not help: the next rung of the profile's ladder, then backing-off
                +--> idle           nobody asked for long: closed, so that it can be switched off; back at a frame

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
    MISMATCH = "mismatch"
    QUARANTINED = "quarantined"
    IDLE = "idle"


class Phase(StrEnum):
    """Where in its life a backend is."""

    STARTING = "starting"
    PROVING = "proving"
    SERVING = "serving"
    ENDING = "ending"
    BACKING_OFF = "backing-off"
    QUARANTINED = "quarantined"
    RESETTING = "resetting"
    IDLE = "idle"
    GAVE_UP = "gave-up"


class Rung(StrEnum):
    """What can be done about an NPU that fresh workers do not bring back, from mild to harsh."""

    NEW_WORKER = "new_worker"
    REBIND = "rebind"
    RELOAD_MODULE = "reload_module"
    REBOOT = "reboot"


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
    RESET = "reset"
    CLOSE = "close"
    GIVE_UP = "give-up"


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits of one backend, from the accelerator profile.

    `give_up_after` counts workers that failed in a row; then each rung of `ladder` may be used so often.
    `idle_close_s` 0 never closes. `quarantine_s` is how long a worker that will not die is waited for before a reboot.
    """

    golden_passes: int = 3
    slow_limit: int = 5
    backoff_s: float = 0.5
    backoff_max_s: float = 60.0
    give_up_after: int = 8
    healthy_s: float = 10.0
    settle_s: float = 0.0
    contexts: int = 1
    ladder: tuple[tuple[Rung, int], ...] = ()
    reset_s: float = 30.0
    quarantine_s: float = 30.0
    idle_close_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Life:
    """One backend's state. `reason` is why it does not serve, or `ok`; `rung` the last one used in this row."""

    phase: Phase = Phase.BACKING_OFF
    reason: Reason = Reason.STARTING
    failures: int = 0
    soft_misses: int = 0
    golden_left: int = 0
    since: float = 0.0
    retry_at: float = 0.0
    permanent: bool = False
    used_at: float = 0.0
    rung: Rung | None = None


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


@dataclass(frozen=True, slots=True)
class Wanted:
    """A frame or a self-test came for a backend that was closed because nobody asked."""


@dataclass(frozen=True, slots=True)
class ResetDone:
    """The rung was carried out, or could not be."""

    done: bool


Event = Tick | Ready | GoldenPassed | Answered | SoftMissed | Failed | Ended | Unkillable | Wanted | ResetDone

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
            serving = replace(life, phase=Phase.SERVING, reason=Reason.OK, soft_misses=0, since=now, used_at=now)
            return serving, Action.SERVE
        case Answered() if life.phase is Phase.SERVING:
            return replace(life, soft_misses=0, used_at=now), Action.KEEP
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
            stuck = replace(life, phase=Phase.QUARANTINED, reason=Reason.QUARANTINED, since=now, rung=None)
            return stuck, Action.QUARANTINE
        case Wanted() if life.phase is Phase.IDLE:
            return replace(life, phase=Phase.STARTING), Action.START
        case ResetDone() if life.phase is Phase.RESETTING:
            return _after_reset(life, event.done, now, rules)
        case Ready() | GoldenPassed() | Answered() | SoftMissed() | Failed() | Ended() | Unkillable():
            return life, Action.KEEP
        case Wanted() | ResetDone():
            return life, Action.KEEP
        case _:
            assert_never(event)


def _tick(life: Life, now: float, rules: Rules) -> tuple[Life, Action]:
    match life.phase:
        case Phase.BACKING_OFF if now >= life.retry_at:
            return replace(life, phase=Phase.STARTING), Action.START
        case Phase.SERVING if rules.idle_close_s and now - life.used_at >= rules.idle_close_s:
            return replace(life, phase=Phase.ENDING, reason=Reason.IDLE, failures=0, rung=None), Action.CLOSE
        case Phase.SERVING if life.failures and now - life.since >= rules.healthy_s:
            return replace(life, failures=0, rung=None), Action.KEEP
        case Phase.RESETTING if now >= life.retry_at:
            return _after_reset(life, False, now, rules)
        case Phase.QUARANTINED if life.rung is None and now - life.since >= rules.quarantine_s:
            if any(rung is Rung.REBOOT for rung, limit in rules.ladder if limit):
                return replace(life, rung=Rung.REBOOT), Action.RESET
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
    if life.reason is Reason.IDLE:
        return replace(life, phase=Phase.IDLE), Action.KEEP
    if life.permanent:
        return replace(life, phase=Phase.GAVE_UP), Action.GIVE_UP
    if life.failures >= rules.give_up_after and life.reason not in _NEVER_GIVE_UP:
        rung = _rung(life.failures - rules.give_up_after, rules)
        if rung is None:
            return replace(life, phase=Phase.GAVE_UP), Action.GIVE_UP
        return replace(life, phase=Phase.RESETTING, rung=rung, retry_at=now + rules.reset_s), Action.RESET
    # The first failure is retried at once; after that the pause doubles.
    pause = min(rules.backoff_max_s, rules.backoff_s * 2 ** min(life.failures - 2, 30)) if life.failures > 1 else 0.0
    return replace(life, phase=Phase.BACKING_OFF, retry_at=now + rules.settle_s + pause), Action.KEEP


def _rung(used: int, rules: Rules) -> Rung | None:
    """The rung that is due after `used` uses of the ladder in this row of failures."""
    uses = [rung for rung, limit in rules.ladder for _ in range(limit)]
    return uses[used] if used < len(uses) else None


def _after_reset(life: Life, done: bool, now: float, rules: Rules) -> tuple[Life, Action]:
    # A reboot is the last rung, and whoever counts them has refused. After any other a worker is tried all the same:
    # its failure brings the next rung.
    if life.rung is Rung.REBOOT and not done:
        return replace(life, phase=Phase.GAVE_UP), Action.GIVE_UP
    return replace(life, phase=Phase.BACKING_OFF, retry_at=now + rules.settle_s), Action.KEEP

"""Health: samples of a running set go in; healthy, unhealthy or undecided comes out, with the reason.

Pure: no clock and no bus; the caller takes the samples and says when. Healthy means: every owned unit is active and
has not restarted; and where the pose service is on the bus, its golden frame passed on the backend the model
requires and frames came through where there is a camera. The probation starts after the first invoke, because a new
model may compile for minutes: slow is not hung. A model that runs on the CPU where the NPU is required is unhealthy,
once the NPU has had its time. A unit that ended with status 0 is not active, so it is unhealthy too: a pipeline that
lost its camera ends that way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

# Backend reasons that a retry does not cure; the others (busy, hung, crashed ...) get the NPU's time.
HOPELESS = frozenset({"wrong-result", "bad-model", "mismatch", "refused", "no-npu", "quarantined"})
HAS_TO_RUN = "a service that an extension owns has to go on running"


@dataclass(frozen=True, slots=True)
class UnitState:
    """A unit as systemd describes it. `restarts` is NRestarts; `main_pid` is 0 when nothing runs."""

    name: str
    load: str  # loaded | not-found | masked ...
    active: str  # active | activating | inactive | failed ...
    sub: str
    result: str
    main_pid: int
    restarts: int
    description: str = ""
    is_job: bool = False  # Type=oneshot, and gone when it is done: starting it again does its work again
    spares_others: bool = False  # a stop ends its main process alone (KillMode=), as of an sshd whose sessions live on


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The golden frame's verdict. `oks` is object keypoint similarity 0..1 against the model's recorded pose."""

    passed: bool
    backend: str
    oks: float
    reason: str


@dataclass(frozen=True, slots=True)
class InferenceState:
    """What `org.avocado.Inference1.Describe()` says, as far as the agent reads it."""

    state: str  # starting | serving | degraded | no-camera ...
    backend: str  # npu | cpu | none
    reason: str
    required_backend: str  # npu | any
    model: str
    frames: int
    camera: bool
    first_invoke_done: bool
    nodes: tuple[str, ...]
    settle_s: float
    contexts: int
    message: str = ""  # what is wrong, in the service's own words


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at the set. `self_test` is filled where the golden frame was run for this sample."""

    at_s: float  # monotonic
    units: Mapping[str, UnitState]
    inference: InferenceState | None = None
    self_test: SelfTest | None = None


@dataclass(frozen=True, slots=True)
class HealthPolicy:
    """How long each thing may take. All in seconds but `frames`."""

    appear_s: float = 30.0  # the pose service answers on the bus
    first_invoke_s: float = 300.0
    npu_s: float = 30.0  # after the first invoke: the NPU answers where it is required
    hopeless_s: float = 4.0
    stable_s: float = 4.0  # after the first invoke, or after the start of units that are not on the bus
    deadline_s: float = 60.0  # after the first invoke
    frames: int = 10
    self_tests: int = 2  # wrong answers before the model is called bad


class Health(StrEnum):
    """The verdict."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the samples show. `reason` says why it is not healthy (yet), `unit` which one is to blame, if one is."""

    health: Health
    reason: str = ""
    unit: str = ""


_HEALTHY = Verdict(Health.HEALTHY)


def judge(samples: Sequence[Sample], policy: HealthPolicy, *, expect_inference: bool) -> Verdict:
    """The verdict over all samples since the units were started, oldest first; at least one."""
    broken = _broken_unit(samples)
    if broken:
        return broken
    inference = samples[-1].inference
    if inference is None:
        return _without_inference(samples, policy, expect_inference)
    if any(s.inference and s.inference.first_invoke_done for s in samples):
        return _after_first_invoke(samples, inference, policy)
    if _lasting(samples, policy.hopeless_s, _has_no_backend):
        return _unhealthy(_off_required(inference))
    why = f"model {inference.model} gave no first answer ({inference.reason})"
    return _until(samples, samples[0].at_s, policy.first_invoke_s, why)


def wants_self_test(samples: Sequence[Sample], policy: HealthPolicy) -> bool:
    """Whether the golden frame should be run for the next sample: it costs the service one inference."""
    inference = samples[-1].inference
    if inference is None or not inference.first_invoke_done or not _on_required(inference):
        return False
    done = [s for s in samples if s.self_test]
    if not done:
        return True
    last = done[-1].self_test
    good = last is not None and last.passed and _satisfies(last.backend, inference)
    return not good and samples[-1].at_s - done[-1].at_s >= 1.0


def answering(sample: Sample, *, expect_inference: bool) -> bool:
    """The set does its work again, healthy or not: this ends the time the service was away."""
    if sample.inference is not None:
        return sample.inference.backend != "none" and (sample.inference.frames > 0 or not sample.inference.camera)
    if expect_inference:
        return False
    return all(unit.active == "active" for unit in sample.units.values())


def _broken_unit(samples: Sequence[Sample]) -> Verdict | None:
    first, latest = samples[0].units, samples[-1].units
    for name, unit in latest.items():
        before = first.get(name, unit)
        if unit.load != "loaded":
            return _unhealthy(f"{name} is {unit.load}", name)
        if unit.restarts > before.restarts:
            return _unhealthy(f"{name} restarted {unit.restarts - before.restarts} times ({unit.result})", name)
        if unit.active == "inactive" and unit.result == "success":
            return _unhealthy(f"{name} has ended, and {HAS_TO_RUN}", name)
        if unit.active not in ("active", "reloading"):
            return _unhealthy(f"{name} is {unit.active} ({unit.result})", name)
    return None


def _without_inference(samples: Sequence[Sample], policy: HealthPolicy, expected: bool) -> Verdict:
    seen = [s for s in samples if s.inference]
    since = seen[-1].at_s if seen else samples[0].at_s
    if expected or seen:
        return _until(samples, since, policy.appear_s, "the pose service does not answer on the bus")
    waited = samples[-1].at_s - since
    return _HEALTHY if waited >= policy.stable_s else Verdict(Health.UNDECIDED, "on probation")


def _after_first_invoke(samples: Sequence[Sample], now: InferenceState, policy: HealthPolicy) -> Verdict:
    begin = next(s for s in samples if s.inference and s.inference.first_invoke_done)
    if not _on_required(now):
        why = _off_required(now)
        if _lasting(samples, policy.hopeless_s, _is_hopeless):
            return _unhealthy(why)
        return _until(samples, begin.at_s, policy.npu_s, why)
    tests = [s.self_test for s in samples if s.self_test]
    wrong = [test for test in tests if not test.passed and test.backend != "none"]
    if len(wrong) >= policy.self_tests and tests[-1] is wrong[-1]:
        last = wrong[-1]
        return _unhealthy(
            f"model {now.model} fails its golden frame on {last.backend}: OKS {last.oks:.2f} ({last.reason})"
        )
    unmet = _unmet(samples, begin, now, tests[-1] if tests else None, policy)
    if unmet:
        return _until(samples, begin.at_s, policy.deadline_s, unmet)
    if samples[-1].at_s - begin.at_s < policy.stable_s:
        return Verdict(Health.UNDECIDED, "on probation")
    return _HEALTHY


def _unmet(
    samples: Sequence[Sample], begin: Sample, now: InferenceState, test: SelfTest | None, policy: HealthPolicy
) -> str:
    if test is None:
        return "the golden frame has not been run"
    if not test.passed:
        return f"the golden frame did not pass on {test.backend} ({test.reason})"
    if not _satisfies(test.backend, now):
        return f"the golden frame passed on {test.backend}, but the model requires the NPU"
    came = now.frames - (begin.inference.frames if begin.inference else 0)
    if now.camera and came < policy.frames:
        return f"only {max(came, 0)} of {policy.frames} frames came through"
    return ""


def _satisfies(backend: str, inference: InferenceState) -> bool:
    return backend == "npu" if inference.required_backend == "npu" else backend != "none"


def _off_required(inference: InferenceState) -> str:
    why = f"({inference.reason})" + (f": {inference.message}" if inference.message else "")
    if inference.backend == "none":
        return f"no backend can run model {inference.model} {why}"
    return f"model {inference.model} requires the NPU, but the backend is {inference.backend} {why}"


def _on_required(inference: InferenceState) -> bool:
    return _satisfies(inference.backend, inference)


def _has_no_backend(inference: InferenceState) -> bool:
    return inference.backend == "none" and inference.reason in HOPELESS


def _is_hopeless(inference: InferenceState) -> bool:
    return not _on_required(inference) and inference.reason in HOPELESS


def _lasting(samples: Sequence[Sample], seconds: float, holds: Callable[[InferenceState], bool]) -> bool:
    """The condition holds in every sample of the last `seconds`, and there are that many seconds of samples."""
    since = samples[-1].at_s
    for sample in reversed(samples):
        if sample.inference is None or not holds(sample.inference):
            break
        since = sample.at_s
    return samples[-1].at_s - since >= seconds


def _until(samples: Sequence[Sample], since_s: float, limit_s: float, why: str) -> Verdict:
    waited = samples[-1].at_s - since_s
    if waited >= limit_s:
        return _unhealthy(f"{why} after {limit_s:g} s")
    return Verdict(Health.UNDECIDED, why)


def _unhealthy(reason: str, unit: str = "") -> Verdict:
    return Verdict(Health.UNHEALTHY, reason, unit)

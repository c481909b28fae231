"""Samples in, verdict out: a table of what a running set may look like and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from agent.health import (
    Health,
    HealthPolicy,
    InferenceState,
    Sample,
    SelfTest,
    UnitState,
    Verdict,
    answering,
    judge,
    wants_self_test,
)

POLICY = HealthPolicy()
UNIT = UnitState("pose.service", "loaded", "active", "running", "success", 100, 0)
SERVING = InferenceState(
    state="serving",
    backend="npu",
    reason="ok",
    required_backend="npu",
    model="movenet 2",
    frames=0,
    camera=True,
    first_invoke_done=True,
    nodes=("/dev/simnpu0",),
    settle_s=0.2,
    contexts=1,
)
GOOD = SelfTest(passed=True, backend="npu", oks=0.98, reason="ok")
WRONG = SelfTest(passed=False, backend="npu", oks=0.31, reason="wrong-result")


def life(
    inference: Callable[[float], InferenceState | None],
    *,
    unit: Callable[[float], UnitState] = lambda at: UNIT,
    self_test: SelfTest | None = GOOD,
    policy: HealthPolicy = POLICY,
    limit_s: float = 400,
    expected: bool = True,
) -> tuple[Verdict, float]:
    """Sample twice a second, running the self-test when asked to, until something is decided."""
    samples: list[Sample] = []
    for at in ticks(limit_s):
        test = self_test if samples and wants_self_test(samples, policy) else None
        samples.append(Sample(at, {UNIT.name: unit(at)}, inference(at), test))
        verdict = judge(samples, policy, expect_inference=expected)
        if verdict.health is not Health.UNDECIDED:
            return verdict, at
    return verdict, at


def ticks(limit_s: float) -> Iterator[float]:
    return (n / 2 for n in range(int(limit_s * 2)))


def at_30_fps(at: float, **changes: object) -> InferenceState:
    return replace(SERVING, frames=int(at * 30), **changes)


def test_a_service_that_answers_on_the_npu_is_healthy_after_its_probation() -> None:
    assert life(at_30_fps) == (Verdict(Health.HEALTHY), POLICY.stable_s)


def test_the_probation_starts_after_the_first_invoke_because_slow_is_not_hung() -> None:
    compile_s = 250
    verdict, at = life(lambda t: at_30_fps(t, first_invoke_done=t >= compile_s, backend="npu"))
    assert (verdict.health, at) == (Health.HEALTHY, compile_s + POLICY.stable_s)


def test_a_first_invoke_that_never_ends_is_unhealthy() -> None:
    verdict, at = life(lambda t: replace(SERVING, first_invoke_done=False, reason="starting"))
    assert verdict == Verdict(Health.UNHEALTHY, "model movenet 2 gave no first answer (starting) after 300 s")
    assert at == POLICY.first_invoke_s


UNITS = [
    (replace(UNIT, active="failed", result="exit-code"), "pose.service is failed (exit-code)"),
    (
        replace(UNIT, active="inactive"),
        "pose.service has ended, and a service that an extension owns has to go on running",
    ),
    (replace(UNIT, load="not-found"), "pose.service is not-found"),
    (replace(UNIT, restarts=2, result="watchdog"), "pose.service restarted 2 times (watchdog)"),
    (replace(UNIT, active="activating", result="signal"), "pose.service is activating (signal)"),
]


@pytest.mark.parametrize(("state", "reason"), UNITS)
def test_a_unit_that_does_not_stay_active_is_unhealthy_at_once(state: UnitState, reason: str) -> None:
    verdict, at = life(at_30_fps, unit=lambda t: state if t >= 1 else UNIT)
    assert (verdict, at) == (Verdict(Health.UNHEALTHY, reason, UNIT.name), 1.0)


def test_restarts_from_before_the_change_do_not_count() -> None:
    assert life(at_30_fps, unit=lambda t: replace(UNIT, restarts=7))[0].health is Health.HEALTHY


INFERENCE = [
    (
        "the NPU is required and the CPU answers while the NPU is busy",
        lambda t: at_30_fps(t, backend="cpu", reason="busy"),
        "model movenet 2 requires the NPU, but the backend is cpu (busy) after 30 s",
        POLICY.npu_s,
    ),
    (
        "the NPU lies, so only the CPU is left",
        lambda t: at_30_fps(t, backend="cpu", reason="wrong-result"),
        "model movenet 2 requires the NPU, but the backend is cpu (wrong-result)",
        POLICY.hopeless_s,
    ),
    (
        "the model was made for another delegate than this board's",
        lambda t: at_30_fps(t, backend="cpu", reason="mismatch", message="made for delegate 2, this board has 1"),
        "model movenet 2 requires the NPU, but the backend is cpu (mismatch): made for delegate 2, this board has 1",
        POLICY.hopeless_s,
    ),
    (
        "no backend passes its golden frame",
        lambda t: replace(SERVING, backend="none", reason="wrong-result", first_invoke_done=False),
        "no backend can run model movenet 2 (wrong-result)",
        POLICY.hopeless_s,
    ),
    (
        "no backend answers after the first one failed",
        lambda t: replace(SERVING, backend="none", reason="crashed", required_backend="any"),
        "no backend can run model movenet 2 (crashed) after 30 s",
        POLICY.npu_s,
    ),
    (
        "nobody is on the bus",
        lambda t: None,
        "the pose service does not answer on the bus after 30 s",
        POLICY.appear_s,
    ),
    (
        "it leaves the bus",
        lambda t: at_30_fps(t) if t < 2 else None,
        "the pose service does not answer on the bus after 30 s",
        1.5 + POLICY.appear_s,
    ),
    (
        "the camera gives no frames",
        lambda t: replace(SERVING, frames=3),
        "only 0 of 10 frames came through after 60 s",
        POLICY.deadline_s,
    ),
]


@pytest.mark.parametrize(("inference", "reason", "at_s"), [c[1:] for c in INFERENCE], ids=[c[0] for c in INFERENCE])
def test_an_unhealthy_pose_service_is_named_with_its_reason(inference: Callable, reason: str, at_s: float) -> None:
    assert life(inference) == (Verdict(Health.UNHEALTHY, reason), at_s)


def test_a_model_that_fails_its_golden_frame_is_unhealthy_after_the_second_try() -> None:
    verdict, at = life(at_30_fps, self_test=WRONG)
    assert verdict.reason == "model movenet 2 fails its golden frame on npu: OKS 0.31 (wrong-result)"
    assert at <= 2


def test_an_npu_that_recovers_within_its_time_is_healthy() -> None:
    back_s = 20
    verdict, at = life(lambda t: at_30_fps(t, **({} if t >= back_s else {"backend": "cpu", "reason": "hung"})))
    assert (verdict.health, at) == (Health.HEALTHY, back_s + 0.5)


def test_without_a_camera_no_frames_are_asked_for() -> None:
    assert life(lambda t: replace(SERVING, camera=False, state="no-camera"))[0].health is Health.HEALTHY


def test_the_cpu_is_good_enough_for_a_model_that_does_not_require_the_npu() -> None:
    on_cpu = replace(GOOD, backend="cpu")
    assert life(lambda t: at_30_fps(t, backend="cpu", required_backend="any"), self_test=on_cpu)[0].health is (
        Health.HEALTHY
    )


def test_a_service_that_is_not_expected_on_the_bus_only_has_to_stay_active() -> None:
    assert life(lambda t: None, expected=False) == (Verdict(Health.HEALTHY), POLICY.stable_s)


def test_the_golden_frame_is_not_run_on_a_backend_that_cannot_be_accepted() -> None:
    assert not wants_self_test([Sample(0, {}, replace(SERVING, backend="cpu"))], POLICY)
    assert wants_self_test([Sample(0, {}, SERVING)], POLICY)
    assert not wants_self_test([Sample(0, {}, SERVING, GOOD), Sample(9, {}, SERVING)], POLICY)


def test_a_set_answers_again_with_its_first_frame() -> None:
    assert not answering(Sample(0, {UNIT.name: UNIT}, SERVING), expect_inference=True)
    assert answering(Sample(0, {UNIT.name: UNIT}, replace(SERVING, frames=1)), expect_inference=True)
    assert not answering(Sample(0, {UNIT.name: UNIT}), expect_inference=True)
    assert answering(Sample(0, {UNIT.name: UNIT}), expect_inference=False)

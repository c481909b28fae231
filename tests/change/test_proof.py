"""What keeps a set from being kept: a model, an NPU, an image or a host, each named in the change's reason."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from agent.change.record import NewChange, Outcome
from agent.change.steps.absence import Absence
from agent.change.steps.confirm_health import ConfirmHealth
from agent.contract.errors import ErrorCode, OperationError
from agent.extensions import Kind, MergedSet
from agent.plan import ChangeKind, NpuFacts, Wanted, plan_change
from tests.change.fakes import FakeClock, FakeInference, FakeOverlay, FakeUnits
from tests.change.sets import releases, runtime
from tests.change.stories import R0, R1, R2, board, deploy
from tests.change.wired import change_on, engine_on, observe, run
from tests.change.world import World

BAD = [
    (
        "wrong-result",
        "cannot confirm the new set: model movenet {to} fails its golden frame on npu: OKS 0.31 (wrong-result)",
    ),
    ("cpu", "cannot confirm the new set: model movenet {to} requires the NPU, but the backend is cpu (no-npu)"),
    ("hang", "cannot confirm the new set: model movenet {to} gave no first answer (ok) after 4 s"),
    ("crash-loop", "cannot confirm the new set: pose.service restarted 1 times (success)"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_a_bad_model_is_reverted_with_its_reason(bad: str, message: str) -> None:
    world = board(R1, previous=R0)
    world.bad = {R2.id: bad}
    record = run(world, deploy(R2)())
    assert record.outcome is Outcome.REVERTED
    assert record.reason
    assert (record.reason.code, record.reason.message) == (ErrorCode.UNHEALTHY, message.format(to=R2.id))
    assert record.reason.remedy == "See why: journalctl -b -n 50 -u pose.service"
    assert world.active == R1.id


def test_the_remedy_of_an_unhealthy_set_names_the_unit_that_is() -> None:
    world = board(R1)
    memo = {"units": ["pose.service", "viewer.service"]}
    unused: Any = None
    report: Any = SimpleNamespace(fact=lambda name, value: None)
    step = ConfirmHealth(FakeUnits(world), unused, FakeInference(world), FakeClock(world), Absence(FakeClock(world)))
    with pytest.raises(OperationError) as caught:
        step.do({}, memo, report)
    assert caught.value.message == "cannot confirm the new set: viewer.service is not-found"
    assert caught.value.remedy == "See why: journalctl -b -n 50 -u viewer.service"


def test_a_pose_service_that_hangs_is_replaced_with_a_warning() -> None:
    world = board(R2, previous=R1)
    observed = replace(observe(world), inference=None, silent=True, last_npu=NpuFacts(("/dev/simnpu0",), 0.2, 1))
    steps = plan_change(observed, Wanted(ChangeKind.ROLLBACK, R1))
    record = engine_on(world).run(NewChange("rollback", "root", R2.id, R1.id, steps), lambda _: None, lambda: False)
    assert record.outcome is Outcome.APPLIED
    assert [step.warning for step in record.steps if step.warning] == [
        "pose.service does not answer on the bus; the NPU is taken to be as the last change knew it"
    ]
    assert record.facts["npu"]["nodes"] == ["/dev/simnpu0"]


def test_an_npu_that_is_not_let_go_is_named_with_who_holds_it() -> None:
    record = run(board(R1), deploy(R2)(), stubborn_npu=True)
    assert record.reason
    assert record.reason.code is ErrorCode.NPU_BUSY
    assert record.reason.message == (
        "cannot release the NPU: pid 812 (python3, state D in simnpu_wait) holds /dev/simnpu0, still after 10 s"
    )
    assert record.reason.remedy == "Reboot the board: pid 812 hangs in the kernel at simnpu_wait."


def test_an_incompatible_image_is_refused_before_a_service_stops() -> None:
    world = board(R1)
    world.releases = {image: {kind: dict(keys) for kind, keys in of.items()} for image, of in world.releases.items()}
    model = R2.extensions[1].image_id
    for keys in world.releases[model].values():
        keys["VERSION_ID"] = "99"
    record = run(world, deploy(R2)())
    assert record.reason
    assert (record.outcome, record.reason.code) == (Outcome.REVERTED, ErrorCode.INCOMPATIBLE)
    assert record.reason.message == (
        "cannot merge extension pose-model 2: systemd would ignore it: VERSION_ID=99, the board is 13"
    )
    assert not [call for call in world.calls if call[0] == "stop"]


def test_a_damaged_image_of_a_rollback_is_refused_before_a_service_stops() -> None:
    world = board(R2, previous=R1)
    wanted = Wanted(ChangeKind.ROLLBACK, R1)
    change = change_on(world, wanted)
    world.images.discard(R1.extensions[1].image_id)
    record = engine_on(world).run(change, lambda _: None, lambda: False)
    assert record.reason
    assert record.reason.code is ErrorCode.HASH_MISMATCH
    assert not [call for call in world.calls if call[0] == "stop"]


def test_a_change_of_etc_reverts_when_nobody_comes_back() -> None:
    world = board(R1)
    world.host_comes_back = False
    record = run(world, deploy(R2)())
    assert record.outcome is Outcome.REVERTED
    assert record.reason is not None
    assert record.reason.code is ErrorCode.NOT_CONFIRMED
    assert record.reason.message == (
        "cannot keep the new /etc: the host did not come back over a new connection within 60 s"
    )
    assert (world.active, world.running["pose.service"][0]) == (R1.id, R1.id)


@pytest.mark.parametrize("comes_back", [True, False])
def test_an_unmerge_from_afar_stands_only_when_its_host_comes_back(comes_back: bool) -> None:
    world = board(R1)
    world.host_comes_back = comes_back
    record = run(world, Wanted(ChangeKind.UNMERGE, None, await_host=True))
    assert record.outcome is (Outcome.APPLIED if comes_back else Outcome.REVERTED)
    assert (record.reason and record.reason.code) == (None if comes_back else ErrorCode.NOT_CONFIRMED)
    assert set(world.shown.values()) == {None if comes_back else R1.id}
    assert (world.boot, set(world.running)) == (1, set() if comes_back else {"pose.service"})


def test_a_change_that_leaves_etc_alone_waits_for_nobody() -> None:
    world = board(R2)
    world.host_comes_back = False
    only_the_model = runtime("4", pose_model="4", pose_config="2")
    world.releases = releases(R2, only_the_model)
    record = run(world, deploy(only_the_model)())
    assert record.outcome is Outcome.APPLIED
    assert "await_confirmation" not in {step.kind for step in record.steps}


@pytest.mark.parametrize(
    ("wrongly", "message"),
    [
        ({}, "systemd did not merge confext 99-pose-config"),
        ({Kind.SYSEXT: ("10-stranger",)}, "sysext 10-stranger is merged too"),
    ],
)
def test_an_overlay_that_is_not_exactly_the_wanted_one_is_not_kept(
    wrongly: dict[Kind, tuple[str, ...]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = board(R1, previous=R0)
    merged = FakeOverlay.merged

    def merge(overlay: FakeOverlay) -> MergedSet:
        found = merged(overlay)
        if overlay.world.shown[Kind.SYSEXT] != R2.id:
            return found
        names = {kind: (*names, *wrongly.get(kind, ())) for kind, names in found.names.items()}
        return MergedSet(names if wrongly else {Kind.SYSEXT: names[Kind.SYSEXT]})

    monkeypatch.setattr(FakeOverlay, "merged", merge)
    record = run(world, deploy(R2)())
    assert record.reason
    assert (record.outcome, record.reason.code) == (Outcome.REVERTED, ErrorCode.SWITCH_FAILED)
    assert record.reason.message == f"cannot switch the overlay: {message}"
    assert world.active == R1.id


@pytest.mark.parametrize("during", ["confirm_health", "await_confirmation"])
def test_a_set_that_was_merged_by_hand_during_the_trial_is_not_committed(during: str) -> None:
    world = board(R1, previous=R0)

    def refresh(call: tuple, w: World) -> None:
        if call == ("journal", during, "doing"):
            w.shown = dict.fromkeys(Kind, w.active)

    world.fail_when = refresh
    record = run(world, deploy(R2)())
    assert record.outcome is Outcome.REVERTED
    assert record.reason
    assert (record.reason.code, record.reason.message, record.reason.remedy) == (
        ErrorCode.SWITCH_FAILED,
        "cannot activate runtime npu-pose 2: the merged set was changed during the trial",
        "Ask for the change again, and run neither systemd-sysext nor systemd-confext meanwhile.",
    )
    assert (world.active, world.previous, world.running["pose.service"][0]) == (R1.id, R0.id, R1.id)

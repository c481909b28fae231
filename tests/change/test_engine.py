"""What the engine says and keeps while it runs: progress, facts, reasons, warnings, and its record."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from agent.change.engine import Engine
from agent.change.journal import Journal
from agent.change.record import ChangeRecord, NewChange, Outcome, Phase, parse_record
from agent.change.step import Shutdown
from agent.change.steps.absence import Absence
from agent.change.steps.confirm_health import ConfirmHealth
from agent.change.steps.stop_services import all_of
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.local import disable
from agent.contract.manifest import Manifest
from agent.extensions import Kind
from agent.plan import Bystanders, ChangeKind, NpuFacts, Wanted, plan_change
from agent.ports.files import write_durably
from tests.change.fakes import FakeClock, FakeInference, FakeUnits, World, engine_on, observe, plan_on
from tests.change.sets import releases, runtime
from tests.change.stories import R0, R1, R2, R3, board, deploy, watched


def change_on(world: World, wanted: Wanted) -> NewChange:
    world.offered = wanted.manifest
    to = wanted.manifest.id if wanted.manifest else world.active
    return NewChange(wanted.kind.value, "root", world.active, to, plan_on(world, wanted))


def run(world: World, wanted: Wanted, **settings: object) -> ChangeRecord:
    return engine_on(world, **settings).run(change_on(world, wanted), lambda _: None, lambda: False)


def test_a_deploy_ends_applied_with_its_figures() -> None:
    world = board(R1, previous=R0)
    record = run(world, deploy(R2)())
    assert (record.outcome, record.committed, record.reason) == (Outcome.APPLIED, True, None)
    assert [step.phase for step in record.steps] == [Phase.DONE] * 11
    assert (record.facts["image_bytes"], record.facts["moved_bytes"]) == (2000, 200)
    assert {image["name"]: image["way"] for image in record.facts["images"]} == {
        "pose-config": "delta",
        "pose-model": "delta",
        "pose-app": "held",
        "npu-virtual": "held",
        "avocado-agent": "held",
    }
    assert record.facts["backend"] == "npu"
    assert 0.2 <= record.facts["away_s"] < 1
    assert set(record.facts["took_s"]) == {step.kind for step in record.steps}
    assert record.facts["took_s"]["release_npu"] == 0.2
    assert record.facts["npu"] == {"nodes": ["/dev/simnpu0"], "settle_s": 0.2, "contexts": 1}


def test_a_deploy_touches_the_services_in_this_order() -> None:
    world = board(R1)
    run(world, deploy(R2)())
    effects = [call for call in world.calls if call[0] not in ("journal", "release", "self_test", "holders", "fetch")]
    assert effects == [
        ("index",),
        ("stage", R2.id),
        ("check", R2.id),
        ("stop", "pose.service"),
        ("show", R2.id),
        ("reload_manager",),
        ("start", "pose.service"),
        ("activate", R2.id),
        ("sync_links",),
        ("settle",),
    ]


def test_a_service_of_the_base_that_runs_from_an_image_stops_first_and_starts_last() -> None:
    world = watched(board(R1, previous=R0))
    world.offered = R2
    record = run(world, deploy(R2)())
    assert record.outcome is Outcome.APPLIED
    moves = [call for call in world.calls if call[0] in ("start", "stop")]
    assert moves == [
        ("stop", "viewer.service"),
        ("stop", "pose.service"),
        ("start", "pose.service"),
        ("start", "viewer.service"),
    ]


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


def test_a_change_that_leaves_etc_alone_waits_for_nobody() -> None:
    world = board(R2)
    world.host_comes_back = False
    only_the_model = runtime("4", pose_model="4", pose_config="2")
    world.releases = releases(R2, only_the_model)
    record = run(world, deploy(only_the_model)())
    assert record.outcome is Outcome.APPLIED
    assert "await_confirmation" not in {step.kind for step in record.steps}


def test_a_model_alone_does_not_reload_systemd_and_an_undo_does_not_either() -> None:
    for bad in ("", "cpu"):
        world = board(R2)
        only_the_model = runtime("4", pose_model="4", pose_config="2")
        world.releases = {
            image: {kind: keys | {"EXTENSION_RELOAD_MANAGER": "0"} for kind, keys in kinds.items()}
            for image, kinds in releases(R2, only_the_model).items()
        }
        world.bad = {only_the_model.id: bad}
        record = run(world, deploy(only_the_model)())
        assert record.outcome is (Outcome.REVERTED if bad else Outcome.APPLIED)
        assert ("reload_manager",) not in world.calls


def test_modules_are_loaded_when_their_extension_comes() -> None:
    world = board(None)
    run(world, deploy(R1)())
    assert ("run", "/usr/sbin/modprobe", "--", "simnpu") in world.calls


def test_the_agents_own_extension_stops_nobody() -> None:
    world = board(R1)
    record = run(world, deploy(R3)())
    assert record.outcome is Outcome.APPLIED
    assert not [call for call in world.calls if call[0] in ("stop", "start")]
    assert world.running["pose.service"] == (R1.id, 0.0)


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
        "cannot release the NPU: /dev/simnpu0 by pid 812 (python3, state D in simnpu_wait) still held after 10 s"
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


@pytest.mark.parametrize("bad", ["", "cpu"])
def test_a_bystander_that_fails_is_a_warning_and_no_reason_to_go_back_or_to_be_stuck(bad: str) -> None:
    world = watched(board(R1, previous=R0))
    world.bad = {R2.id: bad}
    world.fail_when = lambda call, _: (
        OperationError(ErrorCode.UNIT_FAILED, f"cannot {call[0]} viewer.service")
        if call in (("start", "viewer.service"), ("stop", "viewer.service"))
        else None
    )
    record = run(world, deploy(R2)())
    assert record.outcome is (Outcome.REVERTED if bad else Outcome.APPLIED)
    assert {step.kind: step.warning for step in record.steps if step.warning} == {
        "stop_services": "cannot stop viewer.service",
        "start_services": "cannot start viewer.service",
    }


def test_a_bystander_that_ends_by_itself_has_nothing_to_prove() -> None:
    world = watched(board(R1, previous=R0))
    world.brief = {"viewer.service"}
    assert run(world, deploy(R2)()).outcome is Outcome.APPLIED


def test_a_job_is_left_alone_and_named() -> None:
    world = board(R1)
    others = Bystanders(jobs=("backup.service",))
    steps = plan_change(replace(observe(world), bystanders=others), Wanted(ChangeKind.REFRESH, None))
    record = engine_on(world).run(NewChange("refresh", "root", R1.id, R1.id, steps), lambda _: None, lambda: False)
    assert [step.warning for step in record.steps if step.warning] == [
        "backup.service runs from an image that leaves; it is a job that ends by itself, and is left alone"
    ]
    assert not [call for call in world.calls if "backup.service" in call]


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


def test_a_service_stopped_by_somebody_stays_stopped() -> None:
    world = board(R1)
    world.running = {}
    record = run(world, deploy(R2)())
    assert (record.outcome, world.running) == (Outcome.APPLIED, {})


def test_a_unit_that_was_left_out_here_is_not_started() -> None:
    without_app = disable(R1, "pose-app")
    world = board(without_app)
    world.running, world.missing = {}, {"pose.service"}
    record = run(world, Wanted(ChangeKind.REFRESH, None))
    assert (record.outcome, record.reason, world.running) == (Outcome.APPLIED, None, {})


def test_a_service_stopped_after_the_plan_was_made_stays_stopped() -> None:
    world = board(R1)
    change = change_on(world, deploy(R2)())
    world.running = {}
    record = engine_on(world).run(change, lambda _: None, lambda: False)
    assert (record.outcome, world.running) == (Outcome.APPLIED, {})


def test_after_a_stuck_change_a_stopped_service_is_no_wish() -> None:
    world = board(R1)
    steps = plan_change(replace(observe(world), after_stuck=True), Wanted(ChangeKind.REFRESH, None))
    world.running = {}
    engine_on(world).run(NewChange("refresh", "root", R1.id, R1.id, steps), lambda _: None, lambda: False)
    assert set(world.running) == {"pose.service"}


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("bad", ["", "cpu"])
def test_a_masked_service_is_never_started(runs: bool, bad: str) -> None:
    world = watched(board(R1, previous=R0))
    world.masked = {"pose.service", "viewer.service"}
    world.bad = {R2.id: bad}
    if not runs:
        world.running = {}
    record = run(world, deploy(R2)())
    assert (record.outcome, world.running) == (Outcome.APPLIED, {})
    assert not [call for call in world.calls if call[0] == "start"]


def test_a_clean_up_that_fails_after_the_commit_is_a_warning() -> None:
    world = board(R1, previous=R0)
    world.fail_when = lambda call, w: (
        OperationError(ErrorCode.INTERNAL, "cannot remove it") if call[0] == "remove_image" else None
    )
    record = run(world, deploy(R2)())
    assert (record.outcome, record.reason) == (Outcome.APPLIED, None)
    assert record.steps[-1].warning == "cannot remove it"


def test_progress_carries_bytes_and_whole_records() -> None:
    world = board(R1)
    seen: list[ChangeRecord] = []
    engine_on(world).run(change_on(world, deploy(R2)()), seen.append, lambda: False)
    figures = [(r.facts["bytes_done"], r.facts["bytes_total"]) for r in seen if "bytes_done" in r.facts]
    assert figures[0] == (0, 200)
    assert (200, 200) in figures
    assert [r.outcome for r in seen][-1] is Outcome.APPLIED
    assert {r.step.kind for r in seen if r.step} == {step.kind for step in seen[-1].steps}


def test_a_cancelled_fetch_stops_in_the_middle() -> None:
    world = board(R1)
    answers = iter([False, False, True] + [True] * 50)
    record = engine_on(world).run(change_on(world, deploy(R2)()), lambda _: None, lambda: next(answers))
    assert record.outcome is Outcome.CANCELLED
    assert record.reason
    assert record.reason.message == "cannot finish change 1: it was cancelled"
    assert not [call for call in world.calls if call[0] in ("stage", "stop")]


def test_a_change_that_waits_for_its_host_is_cancelled_at_once() -> None:
    world = board(R1, previous=R0)
    world.host_comes_back = False
    engine = engine_on(world)
    cancelled: list[str] = []

    def watch(record: ChangeRecord) -> None:
        if record.step and record.step.kind == "await_confirmation" and engine.cancellable(record):
            cancelled.append(record.step.phase)

    began_s = world.now_s
    record = engine.run(change_on(world, deploy(R2)()), watch, lambda: bool(cancelled))
    assert record.outcome is Outcome.CANCELLED
    assert record.reason
    assert record.reason.message == "cannot finish change 1: it was cancelled"
    assert (world.active, world.previous, world.running["pose.service"][0]) == (R1.id, R0.id, R1.id)
    assert world.now_s - began_s < 10


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


def test_a_change_can_be_cancelled_until_the_switch_begins_and_while_it_waits_for_its_host() -> None:
    world = board(R1)
    engine = engine_on(world)
    answers: dict[str, bool] = {}

    def watch(record: ChangeRecord) -> None:
        if record.step and record.step.phase is Phase.DOING:
            answers[record.step.kind] = engine.cancellable(record)

    engine.run(change_on(world, deploy(R2)()), watch, lambda: False)
    assert [kind for kind, may in answers.items() if may] == [
        "fetch_images",
        "stage_runtime",
        "stop_services",
        "release_npu",
        "await_confirmation",
    ]


def test_a_shutdown_leaves_the_journal_and_the_next_start_decides() -> None:
    world = board(R1)

    def stop(call: tuple, w: World) -> None:
        if call[0] == "self_test" and w.records[1].attempts == 0:
            raise Shutdown

    world.fail_when = stop
    with pytest.raises(Shutdown):
        run(world, deploy(R2)())
    assert world.records[1].outcome is Outcome.RUNNING
    record = engine_on(world).recover(lambda _: None)
    assert record
    assert record.reason
    assert (record.outcome, record.reason.code) == (Outcome.REVERTED, ErrorCode.CHANGE_REVERTED)
    assert world.running["pose.service"][0] == R1.id


def test_a_bug_in_a_step_reverts_like_any_failure(caplog: pytest.LogCaptureFixture) -> None:
    world = board(R1)

    def bug(call: tuple, w: World) -> None:
        if call == ("show", R2.id):
            raise KeyError("oops")

    world.fail_when = bug
    record = run(world, deploy(R2)())
    assert record.reason
    assert (record.outcome, record.reason.message) == (
        Outcome.REVERTED,
        "cannot finish step switch_overlay: KeyError('oops')",
    )
    assert "Traceback" in caplog.text


def test_one_line_closes_each_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run(board(R1), deploy(R2)())
    closing = caplog.records[-1]
    assert closing.getMessage() == (
        "change 1 (deploy) applied: 200 of 2000 bytes moved, services away for 0.40 s, back on the npu"
    )
    assert (closing.CHANGE_ID, len(closing.MESSAGE_ID)) == ("1", 32)


def test_nothing_is_recovered_when_nothing_ran() -> None:
    world = board(R1)
    assert engine_on(world).recover(lambda _: None) is None
    run(world, deploy(R2)())
    assert engine_on(world).recover(lambda _: None) is None


def test_a_journal_that_takes_nothing_begins_nothing() -> None:
    world = board(R1)
    full = OperationError(ErrorCode.NO_SPACE, "cannot write: full")
    world.fail_when = lambda call, w: full if call[0] == "journal" else None
    with pytest.raises(OperationError, match="cannot write: full"):
        run(world, deploy(R2)())
    assert world.calls == [("journal", None, None)]


@pytest.mark.parametrize(("active", "outcome"), [(R2, Outcome.APPLIED), (R1, Outcome.STUCK)])
def test_a_step_that_only_another_agent_knows_is_not_guessed_at(active: Manifest, outcome: Outcome) -> None:
    world = board(R1)
    done = run(world, deploy(R2)())
    world.active = active.id
    last = len(done.steps) - 1
    world.records[1] = replace(done, outcome=Outcome.RUNNING).with_step(last, kind="polish", phase=Phase.DOING)
    record = engine_on(world).recover(lambda _: None)
    message = "cannot go on with change 1: this agent does not know the step polish"
    assert record
    assert record.outcome is outcome
    assert message in (record.steps[last].warning, (record.reason.message if record.reason else "").split(";")[0])


# --- the record and the journal's files ---


def test_a_record_reads_back_as_it_was_written() -> None:
    record = run(board(R1), deploy(R2)())
    assert parse_record(record.as_bytes()) == record


def test_keys_of_a_later_version_are_ignored_and_a_newer_schema_is_refused() -> None:
    document = run(board(R1), deploy(R2)()).as_dict()
    assert parse_record(json.dumps(document | {"mood": "good"}).encode()).number == 1
    with pytest.raises(OperationError) as caught:
        parse_record(json.dumps(document | {"schema": 2}).encode())
    assert caught.value.code is ErrorCode.NEWER_SCHEMA
    assert caught.value.message == "cannot read the change record: schema 2, this agent reads 1"


@pytest.fixture
def journal(tmp_path) -> Journal:
    return Journal(tmp_path / "changes", write_durably)


def test_numbers_only_grow_and_strangers_are_left_alone(journal: Journal) -> None:
    assert (journal.next_number(), journal.newest()) == (1, None)
    record = run(board(R1), deploy(R2)())
    journal.save(record)
    (journal.folder / ".2.json.tmp").write_text("half")
    (journal.folder / "notes.txt").write_text("mine")
    assert (journal.numbers(), journal.next_number(), journal.newest()) == ([1], 2, record)


def plain_record(number: int, outcome: Outcome, **changed: Any) -> ChangeRecord:
    return ChangeRecord(number, "deploy", "boot-1", "root", None, R1.id, (), "", outcome=outcome, **changed)


def test_old_records_go_but_for_those_that_still_say_something(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.change.journal.KEPT", 3)
    journal.save(plain_record(1, Outcome.APPLIED, committed=True))
    journal.save(plain_record(2, Outcome.RUNNING))
    journal.save(plain_record(3, Outcome.APPLIED, committed=True))
    (journal.folder / "4.json").write_text("{")
    for number, outcome in ((5, Outcome.REVERTED), (6, Outcome.PLANNED), (7, Outcome.PLANNED), (8, Outcome.PLANNED)):
        journal.save(plain_record(number, outcome))
    journal.prune()
    assert journal.numbers() == [2, 3, 4, 6, 7, 8]  # 3 says what the board was left as
    assert [record.number for record in journal.changes()] == [3, 2]
    journal.save(plain_record(9, Outcome.APPLIED, committed=True))
    journal.prune()
    assert journal.numbers() == [2, 4, 7, 8, 9]
    assert journal.next_number() == 10


def test_the_end_of_a_change_that_the_disk_did_not_take_is_written_before_the_next_one_begins() -> None:
    world = board(R1, previous=R0)
    full = False

    def refuse(call: Any, world: World) -> OperationError | None:
        return (
            OperationError(ErrorCode.NO_SPACE, "cannot write: the disk is full")
            if call[0] == "journal" and full
            else None
        )

    world.fail_when = refuse
    engine = engine_on(world)

    def is_the_end(record: ChangeRecord) -> None:
        nonlocal full
        full = full or (record.step is not None and record.step.kind == "prune")

    deploying, rolling_back = change_on(world, deploy(R2)()), None
    assert engine.run(deploying, is_the_end, lambda: False).outcome is Outcome.APPLIED
    assert world.records[1].outcome is Outcome.RUNNING
    rolling_back = change_on(world, Wanted(ChangeKind.ROLLBACK, R1))
    with pytest.raises(OperationError):
        engine.run(rolling_back, lambda _: None, lambda: False)
    full = False
    assert engine.run(rolling_back, lambda _: None, lambda: False).outcome is Outcome.APPLIED
    assert [world.records[number].outcome for number in (1, 2)] == [Outcome.APPLIED, Outcome.APPLIED]


def test_a_damaged_record_does_not_hide_the_others(journal: Journal) -> None:
    record = run(board(R1), deploy(R2)())
    journal.save(record)
    (journal.folder / "2.json").write_bytes(b"\0" * 100)
    records, unreadable = journal.history()
    assert records == [record]
    assert [error.remedy for error in unreadable] == [f"Move {journal.folder / '2.json'} out of the folder."]
    with pytest.raises(OperationError, match="of change 2"):
        journal.newest()


def test_a_change_nobody_recorded_is_not_found(journal: Journal) -> None:
    with pytest.raises(OperationError) as caught:
        journal.load(7)
    assert (caught.value.code, caught.value.message) == (ErrorCode.NOT_FOUND, "cannot find change 7")


def test_an_engine_needs_no_step_by_name() -> None:
    world = board(R1)
    record = Engine(NoJournal(), {}, FakeClock(world)).run(
        NewChange("refresh", "root", None, None, ()), lambda _: None, lambda: False
    )
    assert record.outcome is Outcome.APPLIED


class NoJournal:
    def next_number(self) -> int:
        return 1

    def save(self, record: ChangeRecord) -> None:
        pass

    def newest(self) -> ChangeRecord | None:
        return None

    def prune(self) -> None:
        pass


def test_a_clean_up_that_fails_while_going_back_keeps_no_service_stopped() -> None:
    ran: list[str] = []
    failing = {"first"}

    def work(name: str) -> None:
        ran.append(name)
        if name in failing:
            raise OperationError(ErrorCode.UNIT_FAILED, f"cannot run {name}")

    with pytest.raises(OperationError) as caught:
        all_of([partial(work, name) for name in ("first", "second", "third")])
    assert ran == ["first", "second", "third"]
    assert caught.value.message == "cannot run first"

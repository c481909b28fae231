"""Every way the NPU fails: each frame is answered, the reason is right, the NPU comes back, nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inference.errors import InferenceError
from inference.link import Answer, SupervisorLink
from inference.policy import Backend, Phase, Reason
from tests.inference.rig import MODEL, WAIT_S, Camera, Rig, marked_processes, no_process_left
from tests.models import placeholder_model, read, sha256, write


def npu_serves(link: SupervisorLink) -> bool:
    return link.state.backend is Backend.NPU


def test_a_node_that_another_process_holds_is_busy_until_it_is_let_go(rig: Rig) -> None:
    async def scenario() -> None:
        other = Rig(rig.folder)
        async with rig.running() as link, other.running(wait=False) as second:
            camera = Camera(second)
            answer = await camera.until(lambda answer: answer.reason is Reason.BUSY)
            assert answer.backend is Backend.CPU
            assert "Device or resource busy" in second.state.message
            await link.close()
            await camera.until(lambda answer: answer.backend is Backend.NPU)
            await second.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("victim", ["npu", "cpu"])
def test_a_worker_killed_from_outside_is_replaced(rig: Rig, victim: str) -> None:
    async def scenario() -> None:
        async with rig.running() as link:
            camera = Camera(link)
            pid = link.state.workers[victim]
            os.kill(pid, signal.SIGKILL)
            await camera.until(lambda _: link.state.workers.get(victim, pid) != pid and npu_serves(link))

    asyncio.run(scenario())


def test_frames_outlive_the_zygote_and_a_new_one_is_made(rig: Rig) -> None:
    async def scenario() -> None:
        async with rig.running() as link:
            camera = Camera(link)
            known = {link.pid, *link.state.workers.values()}
            (zygote,) = marked_processes().keys() - known
            os.kill(zygote, signal.SIGKILL)
            await camera.until(lambda _: zygote not in marked_processes())
            await camera.until(lambda answer: answer.backend is Backend.NPU)
            assert link.state.restarts == 0
            os.kill(link.state.workers["npu"], signal.SIGKILL)
            await camera.until(lambda answer: answer.backend is Backend.CPU)
            await camera.until(lambda answer: answer.backend is Backend.NPU)

    asyncio.run(scenario())


def test_both_backends_failing_at_once_loses_no_frame(rig: Rig) -> None:
    async def scenario() -> None:
        async with rig.running() as link:
            camera = Camera(link)
            for pid in link.state.workers.values():
                os.kill(pid, signal.SIGKILL)
            await camera.until(lambda answer: answer.backend is Backend.NPU)

    asyncio.run(scenario())


def test_several_frames_at_once_are_each_answered_with_their_own_pose(rig: Rig) -> None:
    async def scenario() -> None:
        async with rig.running() as link:
            camera = Camera(link)
            rig.inject("hang")
            answers = await asyncio.gather(*(link.infer(camera.frame) for _ in range(20)))
            assert sorted(answer.sequence for answer in answers) == [answer.sequence for answer in answers]
            assert {answer.backend for answer in answers} == {Backend.CPU}
            assert min(camera.oks(answer) for answer in answers) > 0.9

    asyncio.run(scenario())


def test_the_self_test_names_the_backend_that_serves(rig: Rig) -> None:
    async def scenario() -> None:
        async with rig.running() as link:
            tested = await link.self_test()
            assert (tested.passed, tested.backend, tested.reason) == (True, Backend.NPU, Reason.OK)
            assert tested.oks > 0.9
            rig.inject("create")
            os.kill(link.state.workers["npu"], signal.SIGKILL)
            await Camera(link).until(lambda answer: answer.reason is Reason.REFUSED)
            tested = await link.self_test()
            assert (tested.passed, tested.backend, tested.reason) == (True, Backend.CPU, Reason.REFUSED)

    asyncio.run(scenario())


def spoiled_copy(folder: Path) -> Path:
    copy = folder / "model"
    copy.mkdir()
    for file in MODEL.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def test_a_model_whose_golden_pose_is_wrong_answers_nothing(rig: Rig) -> None:
    rig.model_dir = spoiled_copy(rig.folder)
    document = read(rig.model_dir)
    for pose in document["golden"]["poses"].values():
        pose[:] = [[0.9 - y, 0.9 - x, score] for y, x, score in pose]
    write(rig.model_dir, document)

    async def scenario() -> None:
        async with rig.running(wait=False, recovery={"give_up_after": 2}) as link:
            with pytest.raises(InferenceError, match=r"cannot trust the (npu|cpu): its golden frame has OKS"):
                await link.infer(Camera(link).frame)
            tested = await link.self_test()
            assert (tested.passed, tested.backend, tested.reason) == (False, Backend.NONE, Reason.WRONG_RESULT)
            assert tested.oks < 0.5
            assert link.state.first_invoke_done

    asyncio.run(scenario())


def test_a_file_that_is_no_model_ends_workers_and_says_why(rig: Rig) -> None:
    rig.model_dir = placeholder_model(rig.folder / "model")

    async def scenario() -> None:
        async with rig.running(wait=False) as link:
            with pytest.raises(InferenceError, match=r"cannot load cpu\.tflite: "):
                await link.wait_serving(WAIT_S)
            assert (link.state.phase, link.state.reason) == (Phase.GAVE_UP, Reason.BAD_MODEL)
            assert link.alive

    asyncio.run(scenario())


def test_a_damaged_file_is_known_by_its_hash_before_it_is_read(rig: Rig) -> None:
    rig.model_dir = spoiled_copy(rig.folder)
    name = read(rig.model_dir)["files"]["cpu"]["path"]
    path = rig.model_dir / name
    before = sha256(path)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)

    async def scenario() -> None:
        async with rig.running(wait=False) as link:
            with pytest.raises(InferenceError, match=f"has sha256 [0-9a-f]{{12}}, model.json says {before[:12]}"):
                await link.wait_serving(WAIT_S)

    asyncio.run(scenario())


async def given_up(link: SupervisorLink, reason: Reason) -> Answer:
    """An answer with this reason once the NPU is given up: its worker's end comes between the two."""
    return await Camera(link).until(lambda one: one.reason is reason and link.state.phase is Phase.GAVE_UP)


def test_a_model_not_prepared_for_this_npu_is_served_by_the_cpu_with_the_reason(rig: Rig) -> None:
    rig.model_dir = spoiled_copy(rig.folder)
    document = read(rig.model_dir)
    for table in (document["files"], document["golden"]["poses"], document["golden"]["oks_min"]):
        table.pop("virtual")
    write(rig.model_dir, document)

    async def scenario() -> None:
        async with rig.running(wait=False) as link:
            answer = await given_up(link, Reason.BAD_MODEL)
            assert answer.backend is Backend.CPU
            assert "cannot load movenet-lightning for virtual: it was prepared for cpu" in link.state.message

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("what", "made_for", "cause"),
    [
        ("delegate", "2.0.0", "its file was made for delegate 2.0.0, and this board has 1.0.0"),
        ("schema", "4", "its file needs schema 4 or later, and this board has 3"),
    ],
)
def test_a_file_made_for_another_version_is_never_loaded_on_the_npu_and_both_are_named(
    rig: Rig, what: str, made_for: str, cause: str
) -> None:
    rig.model_dir = spoiled_copy(rig.folder)
    document = read(rig.model_dir)
    document["files"]["virtual"]["pairing"][what] = made_for
    write(rig.model_dir, document)

    async def scenario() -> None:
        async with rig.running(wait=False, options={"log": str(rig.folder / "npu-log")}) as link:
            answer = await given_up(link, Reason.MISMATCH)
            assert answer.backend is Backend.CPU
            assert link.state.message == f"cannot run movenet-lightning on virtual: {cause}"
        assert not (rig.folder / "npu-log").exists()

    asyncio.run(scenario())


def test_the_cpu_too_refuses_a_file_that_needs_a_later_runtime(rig: Rig) -> None:
    rig.model_dir = spoiled_copy(rig.folder)
    document = read(rig.model_dir)
    document["files"]["cpu"]["pairing"]["runtime"] = "99.0"
    write(rig.model_dir, document)

    async def scenario() -> None:
        async with rig.running(wait=False) as link:
            await link.wait_serving(WAIT_S, backend=Backend.NPU)
            await Camera(link).until(lambda _: link.state.backends[Backend.CPU]["failures"] > 0)
            message = link.state.backends[Backend.CPU]["message"]
            assert message.startswith("cannot run movenet-lightning on cpu: its file needs runtime 99.0 or later")

    asyncio.run(scenario())


def test_a_supervisor_that_dies_takes_its_workers_along_and_the_link_says_so(rig: Rig) -> None:
    async def scenario() -> None:
        async with rig.running() as link:
            camera = Camera(link)
            rig.inject("hang")
            waiting = asyncio.create_task(link.infer(camera.frame))
            await asyncio.sleep(0.01)
            os.kill(link.pid, signal.SIGKILL)
            with pytest.raises(InferenceError, match="cannot answer: the supervisor died"):
                await waiting
            with pytest.raises(InferenceError, match="cannot reach the supervisor"):
                await link.infer(camera.frame)
            assert not link.alive

    asyncio.run(scenario())


def test_a_frozen_supervisor_shows_by_its_heartbeat(rig: Rig) -> None:
    async def scenario() -> None:
        async with rig.running() as link:
            fresh = link.state.heartbeat_monotonic
            await asyncio.sleep(0.8)
            assert link.state.heartbeat_monotonic > fresh
            os.kill(link.pid, signal.SIGSTOP)
            await asyncio.sleep(0.1)
            frozen = link.state.heartbeat_monotonic
            await asyncio.sleep(0.8)
            assert link.state.heartbeat_monotonic == frozen
            os.kill(link.pid, signal.SIGCONT)
            await Camera(link).until(lambda _: link.state.heartbeat_monotonic > frozen)

    asyncio.run(scenario())


SERVICE = """
import asyncio, json, sys
from pathlib import Path
from inference.link import SupervisorLink, SupervisorSettings
from inference.policy import Backend

async def main():
    model, folder, overrides = sys.argv[1:]
    link = await SupervisorLink.start(SupervisorSettings(Path(model), "virtual", Path(folder), json.loads(overrides)))
    await link.wait_serving(20, backend=Backend.NPU)
    print("serving", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["ok", "hang"])
def test_nothing_outlives_a_service_that_is_killed(rig: Rig, mode: str) -> None:
    settings = rig.settings()
    arguments = [str(settings.model_dir), str(settings.run_dir), json.dumps(settings.overrides)]
    with subprocess.Popen([sys.executable, "-c", SERVICE, *arguments], stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == b"serving\n"
        assert len(marked_processes()) == 5, "service, supervisor, zygote and two workers"
        rig.inject(mode)
        # Long enough for the periodic golden frame to meet the hang.
        time.sleep(0.3)
        service.kill()
    asyncio.run(no_process_left())


def test_a_board_without_an_npu_is_served_by_the_cpu_and_that_is_no_fault(rig: Rig) -> None:
    async def scenario() -> None:
        settings = rig.settings()
        link = await SupervisorLink.start(type(settings)(settings.model_dir, "cpu", settings.run_dir))
        try:
            answer = await link.infer(Camera(link).frame)
            assert (answer.backend, answer.reason, answer.fell_back) == (Backend.CPU, Reason.NO_NPU, False)
        finally:
            await link.close()
        await no_process_left()

    asyncio.run(scenario())

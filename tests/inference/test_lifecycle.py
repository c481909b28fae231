"""What happens between faults: an idle NPU is closed, a starved worker spared, the ladder climbed, a compile kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.link import SupervisorLink
from inference.policy import Backend, Phase, Reason
from inference.reset import REQUEST
from tests.inference.rig import WAIT_S, Camera, Rig


async def state_with(link: SupervisorLink, key: str, value: object) -> None:
    """Wait until the NPU's own report says so, without a frame."""
    deadline = time.monotonic() + WAIT_S
    while link.state.backends["npu"][key] != value:
        assert time.monotonic() < deadline, f"{key} is {link.state.backends['npu'][key]}, not {value}"
        await link.next_state()


def holders(node: Path) -> list[int]:
    """Processes that have the node open."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                links = [entry.readlink() for entry in (folder / "fd").iterdir()]
            except OSError:
                continue
            if node in links:
                found.append(int(folder.name))
    return found


@contextlib.contextmanager
def every_cpu_busy() -> Iterator[None]:
    """One process that spins for each CPU."""
    spinners = [subprocess.Popen(["/bin/sh", "-c", "while :; do :; done"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


def test_an_idle_npu_is_closed_and_the_frame_that_opens_it_is_not_lost(rig: Rig) -> None:
    async def scenario() -> None:
        async with rig.running(recovery={"idle_close_s": 0.6}) as link:
            camera = Camera(link)
            await camera.until(lambda answer: answer.backend is Backend.NPU)
            restarts = link.state.restarts
            await state_with(link, "phase", Phase.IDLE)
            assert (link.state.backend, link.state.reason) == (Backend.CPU, Reason.IDLE)
            assert holders(rig.node) == [], "nothing keeps the device awake"
            answer = await link.infer(camera.frame)
            assert (answer.backend, answer.reason) == (Backend.CPU, Reason.IDLE)
            assert camera.oks(answer) > 0.9
            await camera.until(lambda answer: answer.backend is Backend.NPU)
            assert link.state.restarts == restarts, "closing is no failure"

    asyncio.run(scenario())


def test_a_self_test_opens_an_idle_npu(rig: Rig) -> None:
    async def scenario() -> None:
        async with rig.running(recovery={"idle_close_s": 0.6}) as link:
            await state_with(link, "phase", Phase.IDLE)
            assert (await link.self_test()).passed
            await state_with(link, "phase", Phase.SERVING)

    asyncio.run(scenario())


def test_a_worker_that_got_no_cpu_is_slow_and_not_hung(rig: Rig) -> None:
    async def scenario() -> None:
        async with rig.running() as link:
            camera = Camera(link)
            await camera.until(lambda answer: answer.backend is Backend.NPU)
            worker = link.state.workers["npu"]
            # At the lowest priority beside two spinners it stands in the queue for many hard deadlines in a row.
            os.sched_setscheduler(worker, os.SCHED_IDLE, os.sched_param(0))
            with every_cpu_busy():
                until = time.monotonic() + 1.5
                await camera.until(lambda _: time.monotonic() > until)
            assert link.state.workers["npu"] == worker
            assert link.state.restarts == 0
            assert min(camera.oks(answer) for answer in camera.answers) > 0.9
            os.sched_setscheduler(worker, os.SCHED_OTHER, os.sched_param(0))
            await camera.until(lambda answer: answer.backend is Backend.NPU)

    asyncio.run(scenario())


LADDER: dict[str, Any] = {
    "recovery": {"give_up_after": 2, "golden_passes": 1},
    "reset": {"ladder": ["new_worker", "rebind", "reboot"], "limits": {"rebind": 1, "reboot": 1}, "patience_s": 3},
}


class Root:
    """What pose-reset.service would do: takes each request away and answers it."""

    def __init__(self, rig: Rig, answers: dict[str, tuple[bool, str]]) -> None:
        self.asked: list[str] = []
        self._request = rig.folder / REQUEST
        self._answers = answers
        self.answer = rig.folder / "answer.json"

    def look(self) -> None:
        if not self._request.exists():
            return
        request = json.loads(self._request.read_text())
        self._request.unlink()
        self.asked.append(request["rung"])
        done, message = self._answers[request["rung"]]
        fresh = self.answer.with_suffix(".new")
        fresh.write_text(json.dumps({"number": request["number"], "done": done, "message": message}))
        fresh.rename(self.answer)


def test_the_ladder_is_climbed_until_the_npu_is_back(rig: Rig) -> None:
    root = Root(rig, {"rebind": (True, "taken and given back")})

    async def scenario() -> None:
        async with rig.running(**LADDER, reset_answer=root.answer) as link:
            camera = Camera(link)
            rig.inject("error")

            def looked(_: object) -> bool:
                root.look()
                return bool(root.asked)

            await camera.until(looked)
            rig.inject("ok")
            await camera.until(lambda answer: answer.backend is Backend.NPU)
            assert root.asked == ["rebind"]
            assert min(camera.oks(answer) for answer in camera.answers) > 0.9

    asyncio.run(scenario())


def test_a_refused_reboot_ends_the_ladder_and_the_cpu_goes_on(rig: Rig) -> None:
    refused = "cannot reboot: 1 of 1 reboots were used and the NPU failed again"
    root = Root(rig, {"rebind": (False, "cannot write unbind: Read-only file system"), "reboot": (False, refused)})

    async def scenario() -> None:
        async with rig.running(**LADDER, reset_answer=root.answer) as link:
            camera = Camera(link)
            rig.inject("error")

            def gave_up(_: object) -> bool:
                root.look()
                return link.state.phase is Phase.GAVE_UP

            await camera.until(gave_up)
            assert root.asked == ["rebind", "reboot"]
            assert refused in link.state.message
            assert link.state.remedy
            answer = await link.infer(camera.frame)
            assert (answer.backend, answer.reason) == (Backend.CPU, Reason.ERROR)

    asyncio.run(scenario())


def test_a_request_that_nobody_answers_is_withdrawn(rig: Rig) -> None:
    async def scenario() -> None:
        quick = {**LADDER, "reset": {**LADDER["reset"], "patience_s": 0.2}}
        async with rig.running(**quick) as link:
            camera = Camera(link)
            rig.inject("error")
            await camera.until(lambda _: link.state.phase is Phase.GAVE_UP)
            assert "nobody did it in time" in link.state.message
            assert not (rig.folder / REQUEST).exists()

    asyncio.run(scenario())


def test_a_compiled_graph_is_kept_per_driver_and_model_and_used_again(rig: Rig) -> None:
    options = {"cache": "{cache}/graphs", "warmup_ms": "1500", "log": str(rig.folder / "log")}

    async def scenario() -> None:
        async with rig.running(options=options) as link:
            await link.next_state()
            assert link.state.backends["npu"]["first_invoke_ms"] > 1500
            (folder,) = (rig.folder / "cache").glob("virtual-*")
            assert sorted(entry.name for entry in folder.iterdir()) == ["graphs"]
        async with rig.running(options=options) as link:
            assert "compile: cached" in (rig.folder / "log").read_text()

    asyncio.run(scenario())


def test_each_backend_gets_its_share_of_the_machine(rig: Rig) -> None:
    async def scenario() -> None:
        npu = {"cpus": [0], "nice": 3, "memory_bytes": 2 << 30}
        async with rig.running(resources={"npu": npu}) as link:
            worker, standby = link.state.workers["npu"], link.state.workers["cpu"]
            assert os.sched_getaffinity(worker) == {0}
            # Relative to whatever priority the tests themselves run at.
            assert os.getpriority(os.PRIO_PROCESS, worker) == 3
            limits = Path(f"/proc/{worker}/limits").read_text()
            assert str(2 << 30) in next(line for line in limits.splitlines() if line.startswith("Max data size"))
            assert os.sched_getaffinity(standby) == os.sched_getaffinity(0)

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", ["hang", "error"])
def test_a_fault_while_it_opens_again_is_survived(rig: Rig, mode: str) -> None:
    async def scenario() -> None:
        async with rig.running(recovery={"idle_close_s": 0.5}, deadlines={"first_invoke_s": 1.0}) as link:
            camera = Camera(link)
            await state_with(link, "phase", Phase.IDLE)
            rig.inject(mode)
            reason = Reason.HUNG if mode == "hang" else Reason.ERROR
            await camera.until(lambda answer: answer.reason is reason)
            rig.inject("ok")
            await camera.until(lambda answer: answer.backend is Backend.NPU)

    asyncio.run(scenario())

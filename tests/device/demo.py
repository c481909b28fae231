"""`make demo`: the whole job on the virtual board, told as it happens, every figure measured in this run.

It builds the reference application, provisions and boots a board, streams poses from a filmed person, deploys a new
model as a signed delta while a viewer reads poses the whole time, hangs the NPU, deploys a model that fails its golden
frame, and ends with where to look in a browser. `--once` ends by itself and writes `build/demo.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from tests.device.board import TREE, Board
from tests.device.forward import Forward
from tests.device.poses import PoseReader, Seen
from tests.device.process import BoardError
from tests.device.progress import step
from tests.device.reference import NEW_MODEL, PAGE_PORT, Ran, Reference, wait_until_serving
from tests.models import spoil_model

DEMO = TREE / "build/demo"
RESULT = TREE / "build/demo.json"
SETTLE_S = 2.0
HANG_S = 30.0


def main() -> int:
    """Run the demonstration; 0 when everything happened as it should."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--once", action="store_true", help="end by itself instead of leaving the board up")
    options = parser.parse_args()
    RESULT.unlink(missing_ok=True)
    try:
        with Board.create("demo" if not options.once else f"demo-{os.getpid()}") as board:
            document = run(board)
            RESULT.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            say(f"every figure above is in {RESULT.relative_to(TREE)}")
            if not options.once:
                stay(board)
    except (BoardError, TimeoutError, subprocess.TimeoutExpired) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0


def run(board: Board) -> dict[str, Any]:
    """Every act, in order; gives the document of build/demo.json."""
    project = prepare(board)
    with board.forward(PAGE_PORT) as page, PoseReader(page.port) as viewer:
        first = viewer.wait_for(lambda seen: seen.backend == "npu", 30)
        say(f"poses arrive: number {first.sequence}, on the {first.backend}")
        before = project.status(board)["runtime"]
        deployed = deploy_new_model(project, board, viewer)
        status = show_status(project, board)
        hang = hang_the_npu(board, viewer)
        rollback = deploy_bad_model(project, board, viewer)
    if status["runtime"]["id"] == before["id"]:
        raise BoardError("the deploy ended well, but the board still names the old runtime")
    return {"status": status, "deploy": deployed, "hang": hang, "rollback": rollback}


def prepare(board: Board) -> Reference:
    """From a checkout to a serving board."""
    title("Build the reference application and provision a board with it")
    with step("building five extensions"):
        project = Reference.start(DEMO / "project")
        built = project.build()
    for image in built["runtime"]["extensions"]:
        say(f"{image['name']:14} {image['size_bytes'] / 1e6:7.2f} MB  {image['image_id'][:8]}")
    with step("provisioning"):
        project.provision(board)
    with step("booting"):
        began = time.monotonic()
        board.boot()
        wait_until_serving(board)
    say(f"the board serves poses on its NPU {time.monotonic() - began:.1f} s after power on")
    return project


def deploy_new_model(project: Reference, board: Board, viewer: PoseReader) -> dict[str, Any]:
    """A recalibrated model, as a signed delta over ssh, while the viewer goes on reading."""
    title("Deploy a recalibrated model: avocadoctl -H root@board deploy")
    project.use_model(NEW_MODEL)
    began = time.monotonic()
    ran = project.deploy(board)
    ended = time.monotonic()
    show_deploy(ran)
    back = viewer.wait_for(lambda seen: seen.backend == "npu", 30, since=ended)
    document = ran.document
    figures = {
        "image_bytes": document["image_bytes"],
        "moved_bytes": document["moved_bytes"],
        "seconds": round(ended - began, 3),
        "gap_ms": round(viewer.longest_gap_ms(began, back.at), 1),
        "backend": document["backend"],
    }
    say(
        f"moved {figures['moved_bytes']:,} of {figures['image_bytes']:,} bytes in {figures['seconds']:.1f} s; "
        f"the viewer waited {figures['gap_ms']:.0f} ms; back on the {figures['backend']}"
    )
    return figures


def show_status(project: Reference, board: Board) -> dict[str, Any]:
    """What an engineer sees over ssh."""
    title("ssh board avocadoctl status")
    show(board.ssh(["avocadoctl", "status"]).stdout)
    return project.status(board)


def hang_the_npu(board: Board, viewer: PoseReader) -> dict[str, Any]:
    """The NPU stops answering: the CPU answers the same frame, and the NPU comes back by itself."""
    title("Hang the NPU: ssh board avocado-infer inject hang")
    inference = json.loads(board.ssh(["avocadoctl", "-o", "json", "status"]).stdout)["inference"]
    began = time.monotonic()
    show(board.ssh(["avocado-infer", "inject", "hang"], timeout_s=HANG_S + 10).stdout)
    hung = viewer.wait_for(lambda seen: seen.backend == "cpu" and seen.reason == "hung", 5, since=began)
    fell = first_of_its_run(viewer.seen, hung)
    back = viewer.wait_for(lambda seen: seen.backend == "npu", HANG_S, since=hung.at)
    figures = {
        "deadline_ms": round(inference["deadline_ms"]["soft"], 1),
        "first_cpu_answer_ms": round(fell.latency_ms, 1),
        "frames_lost": lost(viewer.seen, began, back.at),
        "back_on_npu_s": round(back.at - fell.at, 2),
    }
    say(
        f"the first frame that the NPU did not answer came from the CPU after {figures['first_cpu_answer_ms']} ms"
        f" (soft deadline {figures['deadline_ms']} ms, none where a golden frame had found the hang);"
        f" {figures['frames_lost']} frames lost; back on the NPU after {figures['back_on_npu_s']} s"
    )
    return figures


def deploy_bad_model(project: Reference, board: Board, viewer: PoseReader) -> dict[str, Any]:
    """A model whose weights were damaged before it was signed: well signed, well formed, wrong."""
    title("Deploy a model that fails its golden frame")
    bad = DEMO / "bad-model"
    shutil.rmtree(bad, ignore_errors=True)
    spoil_model(NEW_MODEL, bad)
    project.use_model(bad)
    ran = project.deploy(board, check=False)
    show_deploy(ran)
    if ran.status == 0:
        raise BoardError("a model that fails its golden frame was accepted")
    viewer.wait_for(lambda seen: seen.backend == "npu", 30, since=time.monotonic())
    error = ran.document["error"]
    restored = project.status(board)["runtime"]["id"]
    say(f"refused with status {ran.status}; the board serves runtime {restored[:8]} again")
    return {"reason": error["message"], "remedy": error["remedy"], "restored_runtime": restored}


def first_of_its_run(seen: list[Seen], one: Seen) -> Seen:
    """The first answer of the unbroken run of one backend's answers that `one` belongs to."""
    at = seen.index(one)
    while at > 0 and seen[at - 1].backend == one.backend:
        at -= 1
    return seen[at]


def lost(seen: list[Seen], start: float, end: float) -> int:
    """Frames of this service that the viewer was never given an answer for, by their numbers."""
    numbers = [one.sequence for one in seen if start <= one.at <= end]
    return max(0, numbers[-1] - numbers[0] + 1 - len(set(numbers))) if numbers else 0


def stay(board: Board) -> None:
    """Leave the board up until Ctrl-C, and say where to look."""
    with Forward(board.ssh_command(), PAGE_PORT, host_port=PAGE_PORT) as page:
        title("The board stays up")
        say(f"the page:   {page.url}/")
        say(f"a shell:    {' '.join(board.ssh_command())}")
        say(f'commands:   PATH={board.access.programs}:"$PATH" avocadoctl -H root@board status')
        say("a fault:    ... ssh root@board avocado-infer inject hang")
        say("Ctrl-C takes the board away.")
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


def title(text: str) -> None:
    """An act begins."""
    print(f"\n== {text}", flush=True)


def say(text: str) -> None:
    """A line of the story."""
    print(f"   {text}", flush=True)


def show_deploy(ran: Ran) -> None:
    """The lines of a deploy; its JSON error is told as the text form tells it."""
    show("\n".join(line for line in ran.stderr.splitlines() if not line.startswith("{")))
    if (error := ran.document.get("error")) is not None:
        show(f"avocadoctl: {error['message']}\n  try: {error['remedy']}")


def show(text: str) -> None:
    """What a command printed, as it printed it."""
    for line in text.rstrip().splitlines():
        print(f"   | {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

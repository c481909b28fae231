"""What a change moves, on the booted board: a fraction of the model, no byte twice, and why, if it is more than that.

One board serves the whole module, and every test leaves it serving.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.delta import zstd
from tests.device.board import TREE, Board
from tests.device.process import holds_within
from tests.device.reference import BOARD, FIRST_MODEL, NEW_MODEL, Reference, wait_until_serving
from tests.models import shift_model

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]

SERVING_S = 90.0
BALLAST_BYTES = 32 << 20
# Far enough for a checkpoint, far from the end.
BEGUN_BYTES = 8 << 20
IMAGES = "/var/lib/avocado/images"


def main_pid(board: Board) -> str:
    return board.exec(["systemctl", "show", "-P", "MainPID", "pose.service"]).stdout.strip()


def image_fact(document: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(image for image in document["change"]["facts"]["images"] if image["name"] == name)
    return found


def test_a_model_whose_weights_all_shifted_moves_a_third_of_itself_at_most(
    serving: Board, project: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project.use_model(shift_model(FIRST_MODEL, tmp_path / "shifted", version="4.0.1"))
    document = project.deploy(serving).document
    assert (document["outcome"], document["backend"]) == ("applied", "npu")
    fact = image_fact(document, "pose-model")
    assert (fact["way"], fact["note"]) == ("delta", "")
    image = (project.folder / f"build/images/{fact['image_id']}.raw").read_bytes()
    whole = len(zstd.compress(image, 19))
    moved = document["moved_bytes"]
    with capsys.disabled():
        print(
            f"\nshifted model: moved {moved:,} bytes, metadata included ({fact['moved_bytes']:,} without); "
            f"zstd -19 of its image {whole:,}; {moved / whole:.3f} of it; {document['seconds']:.1f} s"
        )
    assert fact["moved_bytes"] < moved <= 0.32 * whole


def with_ballast(project: Reference, folder: Path, seed: int) -> None:
    """An extension that takes a while to move: bytes that nothing makes smaller, and no image of before."""
    noise = folder / "noise.tflite"  # stored plain, so that the image is made at once
    noise.write_bytes(random.Random(seed).randbytes(BALLAST_BYTES))
    yaml = project.folder / "avocado.yaml"
    text = yaml.read_text(encoding="utf-8")
    if "ballast" not in text:
        text = text.replace("      - avocado-agent\n", "      - avocado-agent\n      - ballast\n", 1)
        text += '\n  ballast:\n    version: "1"\n    files:\n      usr/share/ballast/noise.tflite: NOISE\n'
    yaml.write_text(re.sub(r"(noise\.tflite: ).*", rf"\g<1>{noise}", text), encoding="utf-8")
    project.build()


def fetched_bytes(board: Board) -> int:
    """How far the fetch of an image has come, as the board remembers it."""
    said = board.exec(["sh", "-c", f"cat {IMAGES}/*.progress"], check=False).stdout
    try:
        return int(json.loads(said)["checkpoint"]["delta_offset"])
    except (ValueError, KeyError):
        return 0


def last_change(board: Board) -> dict[str, Any]:
    """The last change of the board, once it is over."""
    found: list[dict[str, Any]] = []

    def is_over() -> bool:
        said = board.exec(["avocadoctl", "-o", "json", "history"], check=False)
        changes = json.loads(said.stdout) if said.returncode == 0 else []
        found[:] = changes["changes"] if isinstance(changes, dict) else changes
        return bool(found) and found[0]["outcome"] != "running"

    assert holds_within(is_over, 120), found[:1]
    return found[0]


def lose_the_host(deploying: subprocess.Popen[str], board: Board) -> None:
    os.killpg(deploying.pid, signal.SIGKILL)  # avocadoctl and its ssh


def kill_the_agent(deploying: subprocess.Popen[str], board: Board) -> None:
    board.exec(["systemctl", "kill", "--signal=KILL", "avocadod.service"])


def cut_the_power(deploying: subprocess.Popen[str], board: Board) -> None:
    board.power_cut()
    board.boot()


@pytest.mark.parametrize("interrupt", [lose_the_host, kill_the_agent, cut_the_power])
def test_an_interrupted_fetch_goes_on_where_it_was(
    serving: Board,
    project: Reference,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    interrupt: Callable[[subprocess.Popen[str], Board], None],
) -> None:
    with_ballast(project, tmp_path, seed=sum(interrupt.__name__.encode()))
    line = [str(TREE / ".venv/bin/avocadoctl"), "-H", BOARD, "deploy", "-C", str(project.folder)]
    deploying = subprocess.Popen(
        line,
        env=project.environment(serving),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        begun = holds_within(lambda: fetched_bytes(serving) >= BEGUN_BYTES or deploying.poll() is not None, 180)
        assert begun, "the fetch did not begin"
        interrupt(deploying, serving)
        said = deploying.communicate(timeout=180)[1]
    finally:
        deploying.kill()
    assert deploying.returncode != 0, said
    wait_until_serving(serving, SERVING_S)
    assert last_change(serving)["outcome"] == "reverted"
    kept = fetched_bytes(serving)
    assert kept >= BEGUN_BYTES

    began = time.monotonic()
    document = project.deploy(serving).document
    assert document["outcome"] == "applied"
    fact = image_fact(document, "ballast")
    with capsys.disabled():
        print(
            f"\n{interrupt.__name__}: {kept:,} bytes were there, {fact['moved_bytes']:,} of {fact['size_bytes']:,} "
            f"moved after it, in {time.monotonic() - began:.1f} s"
        )
    assert fact["moved_bytes"] <= fact["size_bytes"] - kept + (2 << 20)
    left = serving.exec(["sh", "-c", f"ls {IMAGES} | grep -v '[.]raw$'"], check=False).stdout
    assert left == ""


def test_a_disk_without_room_refuses_and_the_service_never_stops(
    serving: Board, project: Reference, tmp_path: Path
) -> None:
    wait_until_serving(serving, SERVING_S)
    before = main_pid(serving)
    with_ballast(project, tmp_path, seed=99)
    free = int(serving.exec(["stat", "-f", "-c", "%a %S", "/var/lib/avocado"]).stdout.split()[0])
    block = int(serving.exec(["stat", "-f", "-c", "%S", "/var/lib/avocado"]).stdout)
    # What prune would free counts as room, so the filler leaves less than the new image takes and the old one gives.
    serving.exec(["fallocate", "-l", str(free * block - (8 << 20)), "/var/lib/filler"], timeout_s=60)
    try:
        ran = project.deploy(serving, check=False)
    finally:
        serving.exec(["rm", "/var/lib/filler"])
    error = ran.document["error"] if ran.stdout else json.loads(ran.stderr.splitlines()[-1])
    assert error["code"] == "no-space", ran
    assert main_pid(serving) == before
    wait_until_serving(serving, SERVING_S)


def test_a_base_changed_by_one_bit_brings_the_full_transfer_and_is_named(serving: Board, project: Reference) -> None:
    status = project.status(serving)
    active = next(entry for entry in status["extensions"] if entry["name"] == "pose-model")
    path = f"{IMAGES}/{active['imageId']}.raw"
    # One bit in the middle of the weights, which nobody reads again before the next boot.
    flip = f"f=open('{path}','r+b'); f.seek(1500000); b=f.read(1)[0]; f.seek(1500000); f.write(bytes([b^1]))"
    serving.exec(["python3", "-I", "-c", flip])
    project.use_model(NEW_MODEL)
    deploying = project.avocadoctl("-H", BOARD, "deploy", "-C", str(project.folder), board=serving, timeout_s=300)
    note = f"image {active['imageId']} of pose-model {active['version']} is damaged"
    assert f"pose-model came as a full transfer: {note}" in deploying.stdout
    record = serving.exec(["avocadoctl", "-o", "json", "history", "show", str(last_change(serving)["number"])]).stdout
    fact = image_fact({"change": json.loads(record)}, "pose-model")
    assert (fact["way"], fact["base_image_id"], fact["note"]) == ("full", None, note)
    wait_until_serving(serving, SERVING_S)

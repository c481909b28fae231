"""`avocado-infer try` says whether a model works on this board, before anything is switched to it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from inference.cli import main
from tests.inference.rig import LIBRARY, MODEL, Rig, no_process_left
from tests.models import placeholder_model

KEYS = [
    *(
        "accelerator",
        "required_backend",
        "passed",
        "backend",
        "reason",
        "oks",
        "first_invoke_ms",
        "latency_p50_ms",
        "latency_p95_ms",
    ),
    *("model", "version", "runtime", "message", "remedy"),
]


def profile(rig: Rig) -> Path:
    path = rig.folder / "accelerator.toml"
    path.write_text(
        f"""
name = "virtual"
kind = "npu"
nodes = ["{rig.node}"]
[delegate]
path = "{LIBRARY}"
[delegate.options]
node = "{rig.node}"
ops = "ADD"
max_nodes = "1"
control = "{rig.folder / "control"}"
"""
    )
    return path


def tried(
    rig: Rig, capsys: pytest.CaptureFixture[str], *arguments: str, model: Path = MODEL
) -> tuple[int, dict[str, Any]]:
    status = main(["try", "--model", str(model), "--profile", str(profile(rig)), "-o", "json", *arguments])
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    asyncio.run(no_process_left())
    assert list(result) == KEYS
    return status, result


@pytest.mark.parametrize(("backend", "reason"), [("npu", "ok"), ("cpu", "no-npu")])
def test_a_good_model_passes(rig: Rig, capsys: pytest.CaptureFixture[str], backend: str, reason: str) -> None:
    status, result = tried(rig, capsys, "--backend", backend)
    assert (status, result["passed"], result["backend"], result["reason"]) == (0, True, backend, reason)
    assert result["oks"] > 0.9
    assert result["model"] == "movenet-lightning"
    assert 0 < result["latency_p50_ms"] <= result["latency_p95_ms"]
    assert result["first_invoke_ms"] > 0


@pytest.mark.parametrize(
    ("mode", "reason", "message"),
    [
        ("create", "refused", "cannot create delegate"),
        ("busy", "busy", "cannot create delegate"),
        ("error", "error", "cannot run the model: "),
        ("wrong", "wrong-result", "cannot trust the npu: its golden frame has OKS"),
        ("crash", "crashed", "cannot go on: the npu worker died"),
    ],
)
def test_a_failure_is_told_and_not_retried(
    rig: Rig, capsys: pytest.CaptureFixture[str], mode: str, reason: str, message: str
) -> None:
    rig.inject(mode)
    status, result = tried(rig, capsys)
    assert (status, result["passed"], result["reason"]) == (1, False, reason)
    assert message in result["message"]


def test_without_a_word_it_is_the_model_and_the_profile_that_pose_toml_names(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = rig.folder / "pose.toml"
    config.write_text(f'[model]\nfolder = "{MODEL}"\n[accelerator]\nprofile = "{profile(rig)}"\n')
    status = main(["try", "--config", str(config), "-o", "json"])
    result = json.loads(capsys.readouterr().out)
    asyncio.run(no_process_left())
    assert (status, result["accelerator"], result["backend"]) == (0, "virtual", "npu")
    assert (result["model"], result["required_backend"]) == ("movenet-lightning", "npu")


def test_a_folder_without_a_model_is_told_from_a_bad_one(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = tried(rig, capsys, model=rig.folder / "none")
    assert (status, result["passed"], result["reason"]) == (1, False, "no-model")
    assert result["message"] == f"cannot try a model: {rig.folder}/none has no model.json"
    assert (result["remedy"], result["required_backend"]) == ("name a prepared folder: --model DIR", "")


def test_a_pose_toml_that_does_not_read_is_an_error_and_no_result(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    config = rig.folder / "pose.toml"
    config.write_text("[modle]\n")
    assert main(["try", "--config", str(config), "-o", "json"]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == (
        "",
        f"avocado-infer: cannot read {config}: unknown key modle\n  try: did you mean model?\n",
    )


def test_a_file_that_is_no_model_is_named(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = tried(rig, capsys, model=placeholder_model(rig.folder / "model"))
    assert (status, result["reason"]) == (1, "bad-model")
    assert result["message"].startswith("cannot load cpu.tflite: ")

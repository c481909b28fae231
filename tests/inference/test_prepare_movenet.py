"""MoveNet prepared from what `avocado-infer fetch` left: complete, repeatable, near float, and spoiled ones caught."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference import litert
from inference.cli import main
from inference.model import load_centre_weight, load_golden_frame, load_model
from inference.pose import decode_heads, golden_oks
from inference.prepare import made_for, writer
from tests import models

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "build" / "assets"
HEADS = ("center", "regress", "heatmap", "offset")


def prepare(out: Path, variant: str = "percentile") -> Path:
    graph = str(ASSETS / "movenet-lightning.json")
    targets = ["--target", "virtual", "--target", "imx93-frdm"]
    assert main(["prepare", graph, *targets, "--variant", variant, "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ASSETS / "movenet-lightning.json").exists():
        pytest.skip("no weights and pictures: run `make model`")
    return prepare(tmp_path_factory.mktemp("prepared") / "movenet-lightning")


def golden_score(folder: Path, accelerator: str = "cpu", delegate: Any | None = None) -> float:
    model = load_model(folder)
    backend = litert.prepare(
        model.file_for(accelerator), delegate, 1, model.document.input.name, HEADS, model.input_size
    )
    heads = backend.infer(load_golden_frame(model)[None])
    pose = decode_heads(*(heads[name] for name in HEADS), centre_weight=load_centre_weight(model))
    return golden_oks(pose, np.array(model.golden_pose(accelerator), np.float32))


def test_the_folder_loads_and_passes_its_own_golden_frame(prepared):
    model = load_model(prepared)
    assert (model.name, model.version, model.accelerators) == (
        "movenet-lightning",
        "4.1",
        ("cpu", "imx93-ethosu", "virtual"),
    )
    assert model.requirements.backend == "npu"
    assert golden_score(prepared) > 0.999
    pose = np.array(model.golden_pose("virtual"))
    assert (pose[:, 2] > 0.3).all()


def test_the_same_input_gives_the_same_bytes_and_replaces_what_was_there(prepared, tmp_path, capsys):
    out = tmp_path / "movenet-lightning"
    shutil.copytree(prepared, out)
    (out / "cpu.tflite").write_bytes(b"old")
    prepare(out)
    assert [p.name for p in tmp_path.iterdir()] == ["movenet-lightning"]
    assert {p.name for p in out.iterdir()} == {p.name for p in prepared.iterdir()}
    for path in out.iterdir():
        assert path.read_bytes() == (prepared / path.name).read_bytes(), path.name
    said = capsys.readouterr().err.splitlines()
    assert f"{out}: replaces version 4.1" in said
    at = said.index("placement on imx93-ethosu: 1 NPU operator, 0 CPU operators: 93 of 93 operators in 1 piece")
    assert said[at + 1].startswith(
        "  not cut, it would be 13 NPU operators, 29 CPU operators: 131 of 160 operators in 13 pieces; on the CPU: "
    )


def test_it_stays_near_the_float_model_on_pictures_it_never_saw(prepared):
    accuracy = models.read(prepared)["accuracy"]
    for accelerator in ("cpu", "virtual", "imx93-ethosu"):
        assert accuracy[accelerator]["pictures"] >= 30
        assert accuracy[accelerator]["distance_mean"] < 0.012


def test_variants_are_two_versions_alike_in_nearly_every_byte(prepared, tmp_path):
    other = prepare(tmp_path / "movenet-lightning", "minmax")
    assert load_model(other).version == "4.0"
    ours, theirs = (np.frombuffer((f / "cpu.tflite").read_bytes(), np.uint8) for f in (prepared, other))
    assert ours.size == theirs.size
    assert 0 < (ours != theirs).mean() < 0.01
    assert golden_score(other) > 0.999


def test_a_spoiled_model_loads_and_fails_only_its_golden_frame(prepared, tmp_path):
    spoiled = models.spoil_model(prepared, tmp_path / "spoiled")
    assert golden_score(spoiled) < 0.5 < load_model(spoiled).oks_min("cpu")


def test_an_ethos_u_without_vela_is_refused_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert main(["prepare", "never-read.json", "--target", "imx93-ethosu", "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == (
        "avocado-infer: cannot compile for an Ethos-U: vela is not installed\n"
        "  try: install it: pip install ethos-u-vela==5.2.0\n"
    )


def test_an_ethos_u_takes_every_operator_in_one_piece_beside_the_file_the_cpu_falls_back_to(prepared):
    document = models.read(prepared)
    placed = document["placement"]["imx93-ethosu"]
    assert (placed["partitions"], placed["cpu"], sum(placed["accelerated"].values())) == (1, {}, 93)
    assert document["files"]["imx93-ethosu"]["toolchain"]["ethos-u-vela"] == "5.2.0"
    model = load_model(prepared)
    assert b"ethos-u" in model.file_for("imx93-ethosu").read_bytes()
    assert model.file_for("cpu") == model.file_for("virtual")


def test_every_file_records_what_it_was_made_for(prepared):
    files = models.read(prepared)["files"]
    said = {"schema": "3", "runtime": "2.2.0"}
    assert files["cpu"]["pairing"] == said
    assert files["virtual"]["pairing"] == {**said, "delegate": "1.0.0"}
    assert files["imx93-ethosu"]["pairing"] == {"schema": "3", "npu": "ethos-u65-256", "command-stream": "0"}


def test_every_operator_that_is_written_is_dated():
    assert {*writer.OPERATORS.values(), writer.QUANTIZE} == made_for.SINCE.keys()


def test_every_target_keeps_requirements_of_its_own(prepared):
    requirements = load_model(prepared).requirements
    assert (requirements.backend, requirements.latency_p95_ms) == ("npu", 100.0)
    assert requirements.accelerators["imx93-ethosu"].latency_p95_ms == 33.0
    assert requirements.accelerators["imx93-ethosu"].max_cpu_ops == 0
    assert requirements.accuracy == {"max_distance_mean": 0.03, "max_score_error_mean": 0.2}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_one_scale_per_tensor_stays_as_near_to_float_as_one_per_channel(prepared, tmp_path):
    out = tmp_path / "movenet-lightning"
    graph = str(ASSETS / "movenet-lightning.json")
    assert main(["prepare", graph, "--target", "imx8mp-evk", "--out", str(out)]) == 0
    accuracy = models.read(out)["accuracy"]
    assert accuracy["imx8mp-vx"]["distance_mean"] <= max(0.012, 1.5 * accuracy["cpu"]["distance_mean"])
    # The whole of it on the simulated NPU, whose kernels are its own.
    simulated = litert.create_delegate(
        str(ROOT / "build/simnpu/libsimnpu.so"), {"ops": "CONV_2D,DEPTHWISE_CONV_2D,ADD"}
    )
    assert golden_score(out, "imx8mp-vx", simulated) >= load_model(out).oks_min("imx8mp-vx")

"""What `prepare` is given: any float model goes through, and each broken one is refused in its own words."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from PIL import Image

from inference.cli import main
from inference.errors import InferenceError
from inference.model import load_model
from inference.prepare.contract import HEADS, PoseContract, contract_for
from inference.prepare.graph import Activation, Kind, Layer, Net, Padding
from inference.prepare.quantize import zero_byte
from inference.prepare.run import Original, Runner
from inference.prepare.tflite import read_tflite
from inference.prepare.writer import write_float
from tests import models
from tests.networks import SIDE, pictures, small_model, small_net

Edit = Callable[[Any], None]
# Its weights are random: two of its classes are often alike.
LENIENT = ("--require", "min_top1_agreement=0.7")


def edited(content: bytes, change: Edit) -> bytes:
    """A .tflite after a change of its object tree."""
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(content))
    change(model)
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def without_normalisation(model: Any) -> None:
    """The picture goes straight into what read the subtraction's result."""
    graph = model.subgraphs[0]
    subtraction = graph.operators.pop(0)
    for operator in graph.operators:
        operator.inputs = [subtraction.inputs[0] if i == subtraction.outputs[0] else i for i in operator.inputs]


def classifier() -> Net:
    """Pads, pools, flattens and ends in a softmax, as models for classes do."""
    draw = np.random.default_rng(5)

    def conv(out: str, source: str, channels: tuple[int, int], kernel: int, spread: float, **options: Any) -> Layer:
        weights = draw.normal(0, spread, (channels[1], kernel, kernel, channels[0])).astype(np.float32)
        return Layer(Kind.CONV, out, (source,), weights, np.zeros(channels[1], np.float32), **options)

    layers = (
        Layer(Kind.SUBTRACT, "centred", ("image",), subtrahend=127.5),
        Layer(Kind.PAD, "padded", ("centred",), pads=(0, 1, 0, 1)),
        conv("stem", "padded", (3, 8), 3, 0.5 / 127, stride=2, padding=Padding.VALID, activation=Activation.RELU6),
        Layer(Kind.LARGEST, "peaks", ("stem",), size=(2, 2), stride=2, padding=Padding.VALID),
        conv("mixed", "peaks", (8, 16), 1, 0.6, activation=Activation.RELU6),
        Layer(Kind.AVERAGE, "mean", ("mixed",), size=(6, 6), padding=Padding.VALID),
        conv("logits", "mean", (16, 7), 1, 4.0),
        Layer(Kind.RESHAPE, "flat", ("logits",), shape=(1, 7)),
        Layer(Kind.SOFTMAX, "classes", ("flat",)),
    )
    return Net(layers, "image", {"classes": "classes"}, (1, SIDE, SIDE, 3))


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Calibration and held-out pictures where `prepare` looks for them."""
    draw = np.random.default_rng(2)
    for name, count in {"calibration": 6, "heldout": 20}.items():
        (tmp_path / name).mkdir()
        for index in range(count):
            coarse = draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(
                tmp_path / name / f"{index:02d}.png"
            )
    return tmp_path


def given(folder: Path, content: bytes, name: str = "model.tflite") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def prepare(path: Path, *words: str) -> int:
    return main(["prepare", str(path), "--out", str(path.parent / "out"), *(words or ("--target", "cpu"))])


# ---- what goes through ----


def test_a_file_that_was_written_here_is_read_back_to_the_same_network(tmp_path):
    for net in (small_net(), classifier()):
        found = read_tflite(given(tmp_path, write_float(net))).net
        assert [layer.kind for layer in found.layers] == [layer.kind for layer in net.layers]
        first, again = Runner(write_float(net)), Runner(write_float(found))
        for picture in pictures(2):
            for name, value in first(picture).items():
                np.testing.assert_allclose(again(picture)[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("low", "high", "zero"), [(-1.0, 1.0, 128), (0.0, 1.0, 0), (0.0, 255.0, 0)])
def test_the_input_range_becomes_the_zero_point_of_camera_bytes(tmp_path, low, high, zero):
    content = edited(write_float(classifier()), without_normalisation)
    found = read_tflite(given(tmp_path, content), input_range=(low, high))
    assert zero_byte(found.net) == zero
    original, ours = Original(content, ("classes",), low, high), Runner(write_float(found.net))
    for picture in pictures(3):
        np.testing.assert_allclose(ours(picture)["classes"], original(picture)["classes"], atol=1e-4)


@pytest.mark.parametrize("target", ["cpu", "imx8mp-evk"])
def test_a_classifier_goes_through_and_says_what_its_outputs_are(folders, target):
    path = given(folders, write_float(classifier()), "Nice_Classes.tflite")
    assert prepare(path, "--target", target, "--version", "1.2", *LENIENT) == 0
    document = models.read(folders / "out")
    assert (document["name"], document["version"], document["task"]) == ("nice-classes", "1.2", "classification")
    assert document["output"] == {"kind": "scores", "names": {"scores": "classes"}}
    assert document["accuracy"]["cpu"]["top1_agreement"] >= 0.7
    assert document["requirements"]["accuracy"] == {"min_top1_agreement": 0.7}
    assert len(document["golden"]["answers"]["cpu"]) == 5


def test_the_pose_service_refuses_a_model_that_is_none(folders):
    assert prepare(given(folders, write_float(classifier())), "--target", "cpu", *LENIENT) == 0
    with pytest.raises(InferenceError) as caught:
        load_model(folders / "out")
    assert caught.value.message == (
        f"cannot load model {folders / 'out'}: its task is classification, and the pose service runs pose models"
    )


def test_outputs_nobody_here_knows_are_kept_by_name(folders):
    assert prepare(given(folders, write_float(small_net()))) == 0
    document = models.read(folders / "out")
    assert document["version"] == "1.0"
    assert document["output"] == {"kind": "tensors", "names": {"scores": "scores", "features": "features"}}
    assert document["accuracy"]["cpu"]["similarity"] > 0.95


def test_a_quantized_file_is_taken_as_float_when_that_is_asked_for(folders, capsys):
    assert prepare(given(folders, small_model()), "--target", "cpu", "--dequantize") == 0
    said = (
        r"^its values as float beside the quantized original: channel \d of output '\w+' is 0\.99\d\d like float on 20 "
    )
    assert re.search(said, capsys.readouterr().err, re.MULTILINE)


def test_a_neutron_npu_gets_what_the_vendors_converter_makes_where_it_is_installed(folders, monkeypatch, capsys):
    tools = folders / "tools"
    tools.mkdir()
    converter = tools / "neutron-converter"
    converter.write_text(
        '#!/bin/sh\nif [ "$1" = --version ]; then echo 2.1.0; else cp "$2" "$6"; echo "$@" > "$0.log"; fi\n'
    )
    converter.chmod(converter.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    assert prepare(given(folders, write_float(classifier())), "--target", "imx95-frdm", *LENIENT) == 0
    assert "--target imx95" in (tools / "neutron-converter.log").read_text()
    assert models.read(folders / "out")["files"]["imx95-neutron"]["toolchain"]["neutron-converter"] == "2.1.0"
    assert "imx95-neutron: compiled by neutron-converter 2.1.0" in capsys.readouterr().err


def test_a_compiled_file_never_reaches_a_cpu(tmp_path):
    folder = models.placeholder_model(tmp_path / "model")
    document = models.read(folder)
    document["files"]["virtual"]["toolchain"]["ethos-u-vela"] = "5.2.0"
    models.write(folder, document)
    with pytest.raises(InferenceError) as caught:
        load_model(folder)
    assert caught.value.message == (
        f"cannot load model {folder}: model.json: files.cpu was made by ethos-u-vela: no CPU runs it"
    )


def test_any_int8_file_can_be_asked_what_an_npu_takes_of_it(tmp_path, capsys):
    path = given(tmp_path, small_model())
    assert main(["place", str(path), "--target", "imx93-frdm", "--max-cpu-ops", "1"]) == 0
    first, reason = capsys.readouterr().out.splitlines()
    assert first == (
        "model.tflite on imx93-ethosu: 2 NPU operators, 1 CPU operator: "
        "9 of 10 operators in 2 pieces; on the CPU: RESIZE_BILINEAR 1"
    )
    assert reason.startswith("  RESIZE_BILINEAR stays on the CPU: HW scale-factor is not equal")
    assert main(["place", str(path), "--target", "imx93-frdm", "--max-partitions", "1"]) == 1
    assert "2 pieces on the accelerator, at most 1 are allowed" in capsys.readouterr().err


def test_without_its_delegate_an_npu_cannot_be_asked(tmp_path, capsys):
    path = given(tmp_path, small_model())
    assert main(["place", str(path), "--target", "imx8mp-evk"]) == 1
    assert capsys.readouterr().err == (
        f"avocado-infer: cannot place {path} on imx8mp-vx: its delegate is not on this machine\n"
        "  try: run this on the board, or name its library with --delegate\n"
    )


# ---- what does not ----


def custom(name: str) -> Edit:
    def change(model: Any) -> None:
        code = schema.OperatorCodeT()
        code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.CUSTOM
        code.customCode, code.version = name.encode(), 1
        model.operatorCodes.append(code)
        operator = model.subgraphs[0].operators[2]
        operator.opcodeIndex = len(model.operatorCodes) - 1
        operator.builtinOptionsType, operator.builtinOptions = 0, None

    return change


def weights_of(kind: int) -> Edit:
    def change(model: Any) -> None:
        graph = model.subgraphs[0]
        graph.tensors[graph.operators[1].inputs[1]].type = kind

    return change


def open_sides(model: Any) -> None:
    tensor = model.subgraphs[0].tensors[model.subgraphs[0].inputs[0]]
    tensor.shapeSignature = [-1, -1, -1, 3]


FLOAT = write_float(small_net())
CUT = "cut the model before it, or leave that part to the program that reads its outputs"


@pytest.mark.parametrize(
    ("content", "cause", "remedy"),
    [
        pytest.param(b"", "it is empty", "copy or download it again", id="empty"),
        pytest.param(
            b"<html>404</html>",
            "it is not a .tflite model (its bytes 4 to 8 are b'l>40', not b'TFL3')",
            "",
            id="not a model",
        ),
        pytest.param(
            edited(FLOAT, open_sides),
            "tensor 'image' has no fixed size ([-1, -1, -1, 3])",
            "convert it again with a fixed input, such as [1, 224, 224, 3]",
            id="open sizes",
        ),
        pytest.param(
            edited(FLOAT, custom("Hand\x1b[31mMade")),
            r"operator 2, 'Hand\x1b[31mMade', is not supported",
            CUT,
            id="unknown operator",
        ),
        pytest.param(
            edited(FLOAT, custom("ethos-u")),
            "it is compiled for an Ethos-U (operator 'ethos-u')",
            "give the float model it was made from; the CPU needs that one too",
            id="compiled",
        ),
        pytest.param(
            edited(FLOAT, weights_of(schema.TensorType.FLOAT16)),
            "tensor 'stem/weights' is stored as float16",
            "convert it again without the float16 option, as float32",
            id="float16",
        ),
        pytest.param(
            edited(FLOAT, weights_of(schema.TensorType.INT4)),
            "tensor 'stem/weights' has 4-bit weights",
            "give the float model it was made from",
            id="4-bit",
        ),
        pytest.param(
            small_model(),
            "it is already quantized, and quantizing it twice would lose twice",
            "give the float model it was made from; where that is lost, --dequantize takes its values as float",
            id="quantized",
        ),
        pytest.param(
            edited(FLOAT, without_normalisation),
            "nothing in it says what its input expects for black and white",
            "add --input-range LOW,HIGH: what it was trained with, such as -1,1 or 0,1 or 0,255",
            id="no range",
        ),
    ],
)
def test_each_broken_input_has_its_own_words(folders, capsys, content, cause, remedy):
    path = given(folders, content)
    assert prepare(path) == 1
    said = f"avocado-infer: cannot read model {path}: {cause}\n" + (f"  try: {remedy}\n" if remedy else "")
    assert capsys.readouterr().err == said
    assert not (folders / "out").exists()


def test_a_file_that_was_cut_short_is_damaged(folders, capsys):
    path = given(folders, FLOAT[: len(FLOAT) // 2])
    assert prepare(path) == 1
    assert capsys.readouterr().err.startswith(f"avocado-infer: cannot read model {path}: it is damaged (")


def test_without_calibration_pictures_it_says_what_to_put_where(folders, capsys):
    for picture in (folders / "calibration").iterdir():
        picture.unlink()
    assert prepare(given(folders, FLOAT)) == 1
    assert f"cannot calibrate: no pictures in {folders / 'calibration'}\n" in capsys.readouterr().err


def test_a_picture_that_was_calibrated_on_cannot_judge(folders, capsys):
    (folders / "heldout/same.png").write_bytes((folders / "calibration/03.png").read_bytes())
    assert prepare(given(folders, FLOAT)) == 1
    assert f"it is the calibration picture {folders / 'calibration/03.png'}\n" in capsys.readouterr().err


def test_a_model_beyond_its_limits_is_refused_naming_the_step_and_writes_nothing(folders, capsys):
    assert prepare(given(folders, FLOAT), "--target", "cpu", "--require", "min_similarity=0.99999") == 1
    said = (
        r"after the step 'quantized for cpu' channel \d of output '\w+' is 0\.99\d like the float model's, less than 0"
    )
    assert re.search(f"cannot accept the model: {said}", capsys.readouterr().err)
    assert not (folders / "out").exists()


def test_without_the_vendors_converter_an_imx95_is_refused_before_any_work(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["prepare", "never-read.tflite", "--target", "imx95-frdm", "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == (
        "avocado-infer: cannot convert for a Neutron NPU: NXP's neutron-converter is not installed\n"
        "  try: install the eIQ Toolkit of the board's BSP release and put its neutron-converter on PATH\n"
    )


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("latency=3", "cannot require 'latency': it is not known"),
        ("latency_p95_ms=fast", "cannot require latency_p95_ms=fast: it is not a number"),
        ("backend=gpu", "cannot require backend 'gpu'"),
    ],
)
def test_a_requirement_nobody_checks_is_refused(folders, capsys, word, said):
    assert prepare(given(folders, FLOAT), "--target", "cpu", "--require", word) == 1
    assert said in capsys.readouterr().err


# ---- outputs in each other's place ----


def heads(names: dict[str, str]) -> tuple[Net, list[dict[str, np.ndarray]]]:
    """A network with MoveNet's heads under other names, and what it says of one person in the middle."""
    channels = {"center": 1, "regress": 34, "heatmap": 17, "offset": 34}
    layers = [Layer(Kind.SUBTRACT, "centred", ("image",))]
    for head in HEADS:
        count = channels[names[head]]
        weights, bias = np.zeros((count, 4, 4, 3), np.float32), np.zeros(count, np.float32)
        layers.append(Layer(Kind.CONV, head, ("centred",), weights, bias, stride=4))
    net = Net(tuple(layers), "image", {head: head for head in HEADS}, (1, SIDE, SIDE, 3))
    draw = np.random.default_rng(1)
    said = {
        "center": np.exp(-np.hypot(*np.mgrid[-3:3, -3:3]))[None, ..., None],
        "regress": draw.normal(0, 6, (1, 6, 6, 34)),
        "heatmap": draw.random((1, 6, 6, 17)),
        "offset": draw.normal(0, 0.5, (1, 6, 6, 34)),
    }
    return net, [{head: said[names[head]] for head in HEADS}]


@pytest.mark.parametrize(
    ("swapped", "said"),
    [
        ({"regress": "offset", "offset": "regress"}, "'regress' and 'offset' are swapped (they reach "),
        (
            {"center": "heatmap", "heatmap": "center"},
            "'center' has 17 channels instead of 1, as 'heatmap' should: two outputs are swapped",
        ),
    ],
)
def test_two_swapped_outputs_are_found_out(swapped, said):
    net, outputs = heads({head: head for head in HEADS})
    contract = contract_for(net, None)
    assert isinstance(contract, PoseContract)
    contract.check_float(net, outputs)
    net, outputs = heads({head: swapped.get(head, head) for head in HEADS})
    with pytest.raises(InferenceError) as caught:
        contract.check_float(net, outputs)
    assert caught.value.message.startswith(f"cannot use the model's outputs: {said}")
    assert caught.value.remedy == "give each output of the signature its own name and convert it again"

"""What is typed after `prepare` is checked before any work, and pictures are read as a person sees them."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from inference.cli import main
from inference.errors import InferenceError
from inference.prepare.document import slug
from inference.prepare.pictures import read_picture
from inference.prepare.writer import write_float
from tests.networks import small_net


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said of the words, for a model that does not even exist."""
    out = "never-written"
    assert main(["prepare", "never-read.tflite", "--out", out, *words]) == 1
    assert not Path(out).exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "cause"),
    [
        ("latency_p95_ms=nan", "latency_p95_ms=nan: it is not a finite number"),
        ("min_similarity=inf", "min_similarity=inf: it is not a finite number"),
        ("max_cpu_ops=inf", "max_cpu_ops=inf: it is not a finite number"),
        ("max_cpu_ops=1.5", "max_cpu_ops=1.5: it is not a whole number from 0"),
        ("max_partitions=-1", "max_partitions=-1: it is not a whole number from 0"),
        ("frame_rate_fps=0", "frame_rate_fps=0: it is not above 0"),
        ("latency_p95_ms=-5", "latency_p95_ms=-5: it is not above 0"),
    ],
)
def test_a_requirement_that_nothing_could_keep_is_refused(capsys, word, cause):
    said = refused(capsys, "--target", "imx93-frdm", "--require", word)
    assert said == f"avocado-infer: cannot require {cause}\n"


def test_a_limit_on_a_placement_that_nobody_can_count_is_refused(capsys):
    said = refused(capsys, "--target", "imx8mp-evk", "--require", "max_cpu_ops=3")
    assert said == (
        "avocado-infer: cannot require max_cpu_ops on imx8mp-vx: its delegate is not on this machine, and nobody else "
        "can count\n  try: name its library with --delegate, or ask `avocado-infer place` on the board\n"
    )


def test_a_limit_on_the_placement_of_no_npu_is_refused(capsys):
    said = refused(capsys, "--target", "cpu", "--require", "max_partitions=1")
    assert said == (
        "avocado-infer: cannot require max_partitions: there is no NPU among the targets\n  try: add its --target\n"
    )


def test_a_requirement_that_this_kind_of_model_is_not_judged_by_is_refused(tmp_path, capsys):
    path = tmp_path / "model.tflite"
    path.write_bytes(write_float(small_net()))
    words = ["--target", "cpu", "--require", "min_top1_agreement=0.9", "--out", str(tmp_path / "out")]
    assert main(["prepare", str(path), *words]) == 1
    assert capsys.readouterr().err.endswith(
        "avocado-infer: cannot require min_top1_agreement: a model of the task tensors is not judged by it\n"
        "  try: it is judged by min_similarity\n"
    )


@pytest.mark.parametrize("version", ["v 1", "-1", "1/2", "1\n", "9" * 61])
def test_a_version_no_model_may_have_is_refused_before_any_work(capsys, version):
    assert refused(capsys, "--target", "cpu", f"--version={version}") == (
        f"avocado-infer: cannot give a model the version {version!r}\n"
        "  try: use up to 60 letters, digits and . _ + -, beginning with a letter or a digit\n"
    )


@pytest.mark.parametrize("text", ["nan,1", "0,inf", "1,1", "1,-1"])
def test_an_input_range_that_is_none_is_refused(capsys, text):
    assert refused(capsys, "--target", "cpu", f"--input-range={text}") == (
        f"avocado-infer: cannot use the input range {text!r}: LOW is not below HIGH\n  try: such as -1,1\n"
    )


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("Nice_Classes.v2", "nice-classes-v2"),
        ("Mein Modell (neu)", "mein-modell-neu"),
        ("_x", "x"),
        ("模型", "model"),
        ("a" * 59 + "-b", "a" * 59),
    ],
)
def test_any_file_name_gives_a_name(stem, name):
    assert slug(stem) == name


# ---- pictures ----


def test_a_picture_of_sixteen_bits_is_scaled_and_not_clipped(tmp_path):
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(2, 0)
    Image.fromarray(ramp).save(tmp_path / "a.png")
    assert read_picture(tmp_path / "a.png")[0, :, 1].tolist() == list(range(256))


def test_a_picture_is_turned_as_its_exif_data_say(tmp_path):
    frame = np.zeros((4, 8, 3), np.uint8)
    frame[:, :4] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(frame).save(tmp_path / "a.png", exif=exif)
    turned = read_picture(tmp_path / "a.png")
    assert turned.shape == (8, 4, 3)
    assert (turned[:4] == 255).all()


@pytest.mark.parametrize("side", [20, 40], ids=["Pillow warns", "Pillow refuses"])
def test_a_picture_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch, side):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)
    path = tmp_path / "a.png"
    Image.fromarray(np.zeros((side, side, 3), np.uint8)).save(path)
    with warnings.catch_warnings(), pytest.raises(InferenceError) as caught:
        warnings.simplefilter("ignore")
        read_picture(path)
    assert caught.value.message == f"cannot read picture {path}: it has more than 300 pixels"


def test_what_is_no_picture_is_named(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    with pytest.raises(InferenceError) as caught:
        read_picture(path)
    assert caught.value.message == f"cannot read picture {path}: it is not one, or it is cut short"

"""A second real model: MobileNetV2, whose float original is lost, taken as float and prepared again.

The file is not in this repository; where the folder beside it that holds it is missing, this is a counted skip.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from inference.cli import main
from inference.pose import Crop
from inference.tensors import cut
from tests import models

DATA = Path(__file__).parents[3] / "shared" / "data"
MODEL = DATA / "models" / "mobilenet_v2_1.0_224_quant.tflite"
# The skier of the COCO picture, in the list that begins with "background".
SKI = 796

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not MODEL.exists(), reason="../shared/data with MobileNetV2 is not beside this repository"),
]


def write_crops(folder: Path) -> None:
    """A third of the crops of each picture to calibrate on, the others held out."""
    draw = np.random.default_rng(3)
    for name in ("calibration", "heldout"):
        (folder / name).mkdir(parents=True)
    for path in sorted(DATA.glob("images/*.[bj][mp][pg]")):
        frame = np.asarray(Image.open(path).convert("RGB"))
        height, width = frame.shape[:2]
        for index in range(18):
            side = min(height, width) * draw.uniform(0.6, 1)
            crop = Crop(draw.uniform(0, width - side), draw.uniform(0, height - side), side)
            name = "calibration" if index % 3 == 0 else "heldout"
            Image.fromarray(cut(frame, crop, 224)).save(folder / name / f"{path.stem}-{index}.png")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mobilenet")
    write_crops(folder)
    return folder


def prepare(folder: Path, *words: str) -> Path:
    out = folder / "-".join(("out", *words[1::2]))
    pictures = ["--calibration", str(folder / "calibration")]
    assert main(["prepare", str(MODEL), *words, "--dequantize", *pictures, "--out", str(out)]) == 0
    return out


def test_it_is_prepared_again_for_an_ethos_u_and_names_what_its_float_names(folder, capsys):
    out = prepare(folder, "--target", "imx93-frdm")
    document = models.read(out)
    for accelerator in ("cpu", "imx93-ethosu"):
        assert document["accuracy"][accelerator]["pictures"] == 48
        assert document["accuracy"][accelerator]["top1_agreement"] >= 0.85
        first, score = document["golden"]["answers"][accelerator][0]
        assert (first, score > 0.9) == (SKI, True)
    said = capsys.readouterr().err
    assert "placement on imx93-ethosu: 1 NPU operator, 0 CPU operators: 67 of 67 operators in 1 piece\n" in said


@pytest.mark.long
@pytest.mark.timeout(900)
def test_one_scale_per_tensor_agrees_as_often(folder):
    document = models.read(prepare(folder, "--target", "imx8mp-evk"))
    accuracy = document["accuracy"]
    assert accuracy["imx8mp-vx"]["top1_agreement"] >= accuracy["cpu"]["top1_agreement"] - 0.05

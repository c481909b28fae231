"""What goes into a preparation: pictures, MoveNet's graph, and a target that has a recipe."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from PIL import Image

from inference.errors import InferenceError
from inference.prepare import pictures as reference_pictures
from inference.prepare.pictures import load_pictures
from inference.prepare.recipe import accelerator_for
from inference.prepare.tfjs import read_movenet


def test_no_frame_is_both_calibrated_on_and_held_out():
    calibrated = {place[0] for place in reference_pictures.CALIBRATION}
    assert not calibrated & {place[0] for place in reference_pictures.HELD_OUT}


def test_a_picture_of_any_size_gives_its_middle_square(tmp_path):
    wide = np.zeros((50, 100, 3), np.uint8)
    wide[:, 25:75] = 200
    Image.fromarray(wide).save(tmp_path / "a.png")
    (tmp_path / "LICENSE").write_text("not a picture")
    (picture,) = load_pictures(tmp_path, 24)
    assert picture.shape == (24, 24, 3)
    assert (picture[:, 1:-1] == 200).all()


def test_a_folder_without_pictures_and_a_broken_picture_have_their_own_words(tmp_path):
    with pytest.raises(InferenceError) as caught:
        list(load_pictures(tmp_path, 24))
    assert caught.value.message == f"cannot calibrate: no pictures in {tmp_path}"
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8 cut short")
    with pytest.raises(InferenceError) as caught:
        list(load_pictures(tmp_path, 24))
    assert caught.value.message == f"cannot read picture {tmp_path}/a.jpg: it is not one, or it is cut short"


# ---- reading ----


def graph_json(operator: str) -> dict:
    text = lambda word: base64.b64encode(word.encode()).decode()  # noqa: E731
    prefix = "StatefulPartitionedCall/"
    nodes = [
        {"name": f"{prefix}{head}", "op": operator, "input": [f"{prefix}sub_1"], "attr": {"T": {"s": text("x")}}}
        for head in ("Sigmoid_1", "Sigmoid", "kpt_regress_0/conv2d_6/BiasAdd", "kpt_offset_0/conv2d_7/BiasAdd")
    ]
    nodes.append({"name": f"{prefix}sub_1", "op": "Sub", "input": []})
    names = {f"{prefix}truediv": [1], f"{prefix}sub_1/y": [], f"{prefix}Reshape": [1]}
    return {
        "modelTopology": {"node": nodes},
        "signature": {"inputs": {"image": {"tensorShape": {"dim": [{"size": "1"}, {"size": "192"}]}}}},
        "weightsManifest": [
            {
                "paths": ["weights.bin"],
                "weights": [{"name": name, "shape": shape, "dtype": "float32"} for name, shape in names.items()],
            }
        ],
    }


def write_graph(folder, document, weights=(0.0078, 1.0, 0.0)):
    (folder / "weights.bin").write_bytes(np.array(weights, np.float32).tobytes())
    path = folder / "model.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("document", "weights", "cause"),
    [
        ("not json", (0.0078, 1, 0), "Expecting value: line 1 column 1 (char 0)"),
        ("{}", (0.0078, 1, 0), "'modelTopology'"),
        (graph_json("ArgMax"), (0.0078, 1, 0), "operator ArgMax of Sigmoid_1 is not supported"),
        (graph_json("Sigmoid"), (0.0078, 1, 0.5), "it normalises its input in another way"),
        (graph_json("Sigmoid"), (0.0078, 1, 0, 0), "its weights have 16 bytes, its manifest says 12"),
    ],
)
def test_a_graph_that_is_not_movenet_is_refused_naming_the_reason(tmp_path, document, weights, cause):
    path = write_graph(tmp_path, document, weights)
    with pytest.raises(InferenceError) as caught:
        read_movenet(path)
    assert caught.value.message == (
        f"cannot read model {path}: it is not the TensorFlow.js graph of a single-pose MoveNet ({cause})"
    )


def test_a_missing_graph_says_how_to_get_it(tmp_path):
    with pytest.raises(InferenceError) as caught:
        read_movenet(tmp_path / "movenet-lightning.json")
    assert caught.value.message.endswith(": No such file or directory")
    assert caught.value.remedy == "run `avocado-infer fetch` first"


def test_a_target_without_a_recipe_is_refused_by_name():
    with pytest.raises(InferenceError) as caught:
        accelerator_for("toaster")
    assert caught.value.message == (
        "cannot prepare for toaster: there are recipes for the boards imx8mp-evk, imx8mp-frdm, imx8mp-var-dart, "
        "imx93-frdm, imx95-frdm, ucm-imx8m-plus, virtual and the accelerators cpu, imx8mp-vx, imx93-ethosu, "
        "imx95-neutron, virtual"
    )


@pytest.mark.parametrize(
    ("named", "accelerator"),
    [
        ("imx93-frdm", "imx93-ethosu"),
        ("ucm-imx8m-plus", "imx8mp-vx"),
        ("imx95-neutron", "imx95-neutron"),
        ("cpu", "cpu"),
    ],
)
def test_a_board_and_its_accelerator_name_the_same_recipe(named, accelerator):
    assert accelerator_for(named) == accelerator

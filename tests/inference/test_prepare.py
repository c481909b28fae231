"""The steps of preparing a model, on a small network: written, calibrated, quantized, judged, placed."""

from __future__ import annotations

import base64
import json
import weakref
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from inference.errors import InferenceError
from inference.measure.placement import from_details
from inference.prepare import pictures as reference_pictures
from inference.prepare.bias import correct_biases
from inference.prepare.calibrate import Range, extremes, percentiles
from inference.prepare.contract import PoseContract
from inference.prepare.equalise import activity, equalise
from inference.prepare.evaluate import Accuracy, compare_poses, compare_scores, require
from inference.prepare.graph import Net, multiply_accumulates
from inference.prepare.pictures import load_pictures
from inference.prepare.quantize import affine, round_all, round_weights, write_int8
from inference.prepare.recipe import accelerator_for
from inference.prepare.rounding import round_together, second_moments
from inference.prepare.run import Kernels, Runner
from inference.prepare.tfjs import read_movenet
from inference.prepare.writer import write_float
from tests.networks import pictures, small_model, small_net

# ---- writing ----


def test_shapes_follow_padding_and_stride():
    shapes = small_net().shapes
    assert shapes["stem"] == (1, 12, 12, 8)
    assert shapes["half"] == (1, 6, 6, 8)
    assert shapes["valid"] == (1, 4, 4, 6)
    assert shapes["scores"] == (1, 11, 9, 5)


def test_the_cost_of_a_frame_is_counted():
    only_stem = 12 * 12 * 8 * 3 * 3 * 3
    assert multiply_accumulates(small_net()) > only_stem


def test_the_same_network_gives_the_same_bytes():
    assert write_float(small_net()) == write_float(small_net())
    assert small_model() == small_model()
    assert small_model() != small_model(seed=8)


def test_the_runtime_computes_the_float_file_as_written():
    net, picture = small_net(), pictures(1)[0]
    got = Runner(write_float(net, watch=("centred", "stem")), Kernels.REFERENCE)(picture)
    np.testing.assert_allclose(got["centred"][0], picture.astype(np.float32) - np.float32(127.4), rtol=1e-6)
    stem = net.layers[1]
    # SAME padding of a 3x3 kernel with stride 2 on an even side pads only below and to the right.
    window = got["centred"][0][4:7, 6:9]
    expected = np.clip((window[None] * stem.kernel).sum((1, 2, 3)) + stem.offset, 0, 6)
    np.testing.assert_allclose(got["stem"][0, 2, 3], expected, atol=1e-4)


@pytest.mark.parametrize("per_channel", [True, False])
def test_int8_stays_near_float_and_takes_camera_bytes(per_channel):
    net = small_net()
    exact, coded = Runner(write_float(net)), Runner(small_model(per_channel=per_channel))
    for picture in pictures():
        a, b = exact(picture), coded(picture)
        assert np.abs(a["scores"] - b["scores"]).mean() < 0.02
        assert np.corrcoef(a["features"].ravel(), b["features"].ravel())[0, 1] > 0.99


# ---- ranges and codes ----


@pytest.mark.parametrize(
    ("known", "zero_point"), [(Range(0, 6), -128), (Range(-1, 1), 0), (Range(-5, -1), 127), (Range(2, 6), -128)]
)
def test_every_range_can_say_zero_exactly(known, zero_point):
    codes = affine(known)
    assert codes.zero_point == pytest.approx(zero_point, abs=1)
    assert codes.scale > 0


def test_weights_are_symmetric_and_each_channel_uses_all_codes():
    layer = small_net().layers[2]
    codes = round_weights(layer, per_channel=True)
    assert codes.scales.shape == (8,)
    assert np.abs(codes.weights).max(axis=(0, 1, 2)).tolist() == [127] * 8
    np.testing.assert_allclose(codes.weights * codes.scales, layer.kernel, atol=codes.scales.max() / 2 + 1e-9)
    assert round_weights(layer, per_channel=False).scales.shape == (1,)


def test_percentiles_are_those_of_all_values_to_within_a_bin():
    net = small_net()
    known = extremes(net, pictures)
    runner = Runner(write_float(net, watch=("mixed", "wide")))
    values = {name: np.stack([runner(p)[name] for p in pictures()]) for name in ("mixed", "wide")}
    found = percentiles(net, pictures, known, ("mixed", "wide"), 99.0)
    for name in ("mixed", "wide"):
        step = (known[name].high - known[name].low) / 4096
        assert found[name].high == pytest.approx(np.percentile(values[name], 99), abs=3 * step)
    assert found["mixed"].low == pytest.approx(np.percentile(values["mixed"], 1), abs=3 * step)
    assert found["wide"].low == 0.0


def test_calibration_holds_no_more_pictures_than_the_one_at_hand():
    made: list[weakref.ref] = []

    def watched():
        for picture in pictures(6):
            copy = picture.copy()
            made.append(weakref.ref(copy))
            assert sum(one() is not None for one in made) <= 2
            yield copy

    extremes(small_net(), watched)
    assert len(made) == 6


# ---- pictures ----


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


# ---- judging ----


LIMITS = {"max_distance_mean": 0.03, "max_score_error_mean": 0.2}


def poses(shift: float = 0.0, score: float = 0.8) -> list[np.ndarray]:
    grid = np.stack([np.linspace(0.2, 0.8, 17), np.full(17, 0.5 + shift), np.full(17, score)], 1)
    return [grid.astype(np.float32)] * 4


def test_distance_counts_only_points_the_float_model_is_sure_of():
    exact, ours = poses(), [pose.copy() for pose in poses(0.01)]
    exact = [pose.copy() for pose in exact]
    for pose, mine in zip(exact, ours, strict=True):
        pose[0, 2] = 0.1
        mine[0, :2] = 0
    found = compare_poses(ours, exact)
    assert (found.pictures, found.points) == (4, 64)
    assert found.distance_mean == pytest.approx(0.01, rel=1e-4)
    assert found.distance_low <= found.distance_mean <= found.distance_high
    require(found, LIMITS, "quantized")


def test_a_collapsed_model_is_refused_naming_the_step():
    with pytest.raises(InferenceError) as caught:
        require(compare_poses(poses(0.2), poses()), LIMITS, "quantized")
    assert caught.value.message == (
        "cannot accept the model: after the step 'quantized' its points are 0.200 of the input from the float model's, "
        "more than 0.03"
    )


def test_a_model_that_answers_with_no_numbers_is_refused():
    with pytest.raises(InferenceError):
        nothing = float("nan")
        require(Accuracy(4, 68, nothing, nothing, nothing, nothing, 0.0), LIMITS, "quantized")


def test_held_out_pictures_without_a_person_cannot_judge():
    with pytest.raises(InferenceError, match="the float model finds nobody"):
        compare_poses(poses(), poses(score=0.1))


def test_the_golden_frame_is_the_clearest_picture():
    seen = [poses(score=score)[0] for score in (0.4, 0.9, 0.6)]
    assert PoseContract(np.ones((6, 6), np.float32)).clearest(seen) == 1


def test_scores_that_are_off_are_refused_although_the_points_are_right():
    with pytest.raises(InferenceError) as caught:
        require(compare_poses(poses(score=0.4), poses(score=0.8)), LIMITS, "equalised")
    assert caught.value.message == (
        "cannot accept the model: after the step 'equalised' its scores are 0.40 from the float model's, more than 0.2"
    )


def test_classes_are_judged_by_the_first_one_and_its_share_has_an_interval():
    exact = [np.eye(5, dtype=np.float32)[index % 5] for index in range(20)]
    ours = [*exact[:18], exact[0], exact[0]]
    found = compare_scores(ours, exact)
    assert (found.pictures, found.top1_agreement) == (20, 0.9)
    assert 0.69 < found.top1_low < 0.71
    assert 0.96 < found.top1_high < 0.98
    require(found, {"min_top1_agreement": 0.85}, "quantized")
    with pytest.raises(InferenceError) as caught:
        require(found, {"min_top1_agreement": 0.95}, "quantized")
    assert caught.value.message.endswith(
        "it names the float model's first class on 90.0% of the pictures, less than 95%"
    )


# ---- placement ----


def entry(name: str, inputs: list[int], outputs: list[int]) -> dict:
    return {"op_name": name, "inputs": np.array(inputs), "outputs": np.array(outputs)}


CHAIN = [entry("CONV_2D", [0, 10], [1]), entry("ADD", [1, 0], [2]), entry("CONV_2D", [2, 11], [3])]


@pytest.mark.parametrize(
    ("nodes", "accelerated", "cpu", "partitions"),
    [
        ([], {}, {"CONV_2D": 2, "ADD": 1}, 0),
        ([entry("DELEGATE", [0, 10, 11], [3])], {"CONV_2D": 2, "ADD": 1}, {}, 1),
        ([entry("DELEGATE", [1, 0], [2])], {"ADD": 1}, {"CONV_2D": 2}, 1),
        ([entry("DELEGATE", [0, 10], [1]), entry("DELEGATE", [2, 11], [3])], {"CONV_2D": 2}, {"ADD": 1}, 2),
    ],
    ids=["nothing", "everything", "the middle", "both ends"],
)
def test_a_delegates_nodes_are_walked_back_to_the_operators_they_replaced(nodes, accelerated, cpu, partitions):
    found = from_details(CHAIN, CHAIN + nodes)
    assert (dict(found.accelerated), dict(found.cpu), found.partitions) == (accelerated, cpu, partitions)


def test_int8_needs_the_range_of_every_tensor():
    with pytest.raises(KeyError):
        write_int8(small_net(), {}, codes=round_all(small_net(), per_channel=True))


# ---- one scale per tensor ----


def lopsided() -> Net:
    """The small network with one channel of the depthwise layer a hundred times the others, and its reader to match."""
    net = small_net()
    factors = np.ones(8, np.float32)
    factors[3] = 100
    layers = list(net.layers)
    wide, mixed = layers[2], layers[3]
    layers[2] = replace(wide, weights=wide.kernel * factors, bias=wide.offset * factors)
    layers[3] = replace(mixed, weights=mixed.kernel / factors)
    return Net(tuple(layers), net.input, net.outputs, net.input_shape)


def test_equalising_leaves_the_function_alone_and_the_weights_alike():
    net = lopsided()
    alike = equalise(net, activity(net, pictures))
    before, after = Runner(write_float(net), Kernels.REFERENCE), Runner(write_float(alike), Kernels.REFERENCE)
    for picture in pictures():
        for name, value in before(picture).items():
            np.testing.assert_allclose(after(picture)[name], value, rtol=1e-3, atol=1e-3)

    def spread(one: Net) -> float:
        largest = np.abs(one.layers[2].kernel).max(axis=(0, 1, 2))
        return largest.max() / np.median(largest)

    assert spread(net) > 50
    assert spread(alike) < 5


def test_a_channel_that_really_clips_keeps_its_scale():
    net = small_net()
    seen = activity(net, pictures)
    assert seen["stem"].clips.any()
    alike = equalise(net, seen)
    stem, clips = alike.layers[1], seen["stem"].clips
    # The stem is tied to what an ADD sums, so every channel of it that clips stands still.
    np.testing.assert_allclose(stem.kernel[clips], net.layers[1].kernel[clips], rtol=1e-6)


def error(net: Net, content: bytes) -> float:
    exact, coded = Runner(write_float(net), Kernels.REFERENCE), Runner(content, Kernels.REFERENCE)
    return float(np.mean([np.abs(exact(p)["features"] - coded(p)["features"]).mean() for p in pictures()]))


def test_each_step_brings_one_scale_per_tensor_nearer_to_float():
    net = lopsided()
    naive = error(net, write_int8(net, extremes(net, pictures), codes=round_all(net, per_channel=False)))
    alike = equalise(net, activity(net, pictures))
    ranges = extremes(alike, pictures)
    equal = error(net, write_int8(alike, ranges, codes=round_all(alike, per_channel=False)))
    codes = round_together(alike, second_moments(alike, pictures), per_channel=False)
    together = error(net, write_int8(alike, ranges, codes=codes))
    assert equal < 0.5 * naive
    assert together < 1.1 * equal


def test_rounding_together_errs_less_on_what_the_layer_really_sees():
    net = small_net()
    moments = second_moments(net, pictures)
    codes = round_together(net, moments, per_channel=True)
    layer = net.layers[6]
    alone = round_weights(layer, per_channel=True)

    def lost(one) -> float:
        difference = (one.weights * one.scales[:, None, None, None] - layer.kernel).reshape(6, -1)
        return float(np.einsum("ok,kl,ol->", difference, moments[layer.out], difference))

    assert lost(codes[layer.out]) < lost(alone)


def test_corrected_biases_give_back_the_mean():
    net = small_net()
    ranges, codes = extremes(net, pictures), round_all(net, per_channel=False)
    biases = correct_biases(net, pictures, ranges, codes)

    def shift(content: bytes) -> float:
        exact, coded = Runner(write_float(net), Kernels.REFERENCE), Runner(content, Kernels.REFERENCE)
        means = [(exact(p)["features"] - coded(p)["features"]).mean(axis=(0, 1, 2)) for p in pictures()]
        return float(np.abs(np.mean(means, axis=0)).mean())

    assert shift(write_int8(net, ranges, codes=codes, biases=biases)) < shift(write_int8(net, ranges, codes=codes))

"""The steps of making an INT8 file, on a small network: written, calibrated, equalised, rounded, corrected."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest

from inference.prepare.bias import correct_biases
from inference.prepare.calibrate import Range, extremes, percentiles
from inference.prepare.equalise import activity, equalise
from inference.prepare.graph import Net, multiply_accumulates
from inference.prepare.quantize import affine, round_all, round_weights, write_int8
from inference.prepare.rounding import round_together, second_moments
from inference.prepare.run import Kernels, Runner
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

"""The gate: a dead channel is found and named, a model without numbers is refused, and memory does not grow."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from inference.errors import InferenceError
from inference.prepare import judge
from inference.prepare.calibrate import extremes
from inference.prepare.channels import compare_channels
from inference.prepare.contract import contract_for
from inference.prepare.evaluate import compare_poses, compare_scores
from inference.prepare.graph import Net
from inference.prepare.judge import Judge
from inference.prepare.quantize import round_all, write_int8
from inference.prepare.writer import write_float
from tests.networks import SIDE, detector, pictures, small_net


def judged(net: Net, count: int = 20) -> Judge:
    contract = contract_for(net, None)
    return Judge(net, contract, lambda: pictures(count), contract.limits)


def in_int8(net: Net) -> bytes:
    return write_int8(net, extremes(net, pictures), codes=round_all(net, per_channel=True))


def test_a_detector_whose_second_class_dies_in_int8_is_refused_naming_it():
    net = detector(second_class=1e-3)
    with pytest.raises(InferenceError) as caught:
        judged(net).judge_file("quantized for cpu", in_int8(net))
    assert caught.value.message == (
        "cannot accept the model: after the step 'quantized for cpu' channel 1 of output 'scores' is constant"
    )


def test_a_detector_whose_channels_all_live_passes_and_its_worst_is_named():
    net = detector(second_class=0.5)
    runner = judge.Runner(in_int8(net))
    found = judged(net).judge("quantized", lambda picture: contract_for(net, None).answer(runner(picture))).as_dict()
    assert set(found) == {"pictures", "similarity", "worst", "outputs"}
    assert set(found["outputs"]) == {"boxes", "scores"}
    assert found["similarity"] == min(found["outputs"].values()) > 0.95
    assert found["worst"] == "channel 0 of output 'boxes'"


def pairs(ours: list[list[float]], theirs: list[list[float]]) -> Iterator[tuple[dict, dict]]:
    for mine, exact in zip(ours, theirs, strict=True):
        yield {"out": np.array([mine], np.float32)}, {"out": np.array([exact], np.float32)}


EXACT = [[100.0, 5.0, -1.0], [101.0, 5.0, 1.0], [102.0, 5.0, 3.0]]


@pytest.mark.parametrize(
    ("ours", "worst", "similarity"),
    [
        pytest.param(EXACT, "channel 0 of output 'out'", 1.0, id="the same, with a channel that float never moves"),
        pytest.param([[100, 5, 1], [101, 5, 1], [102, 5, 1]], "channel 2 of output 'out'", 0.0, id="dead at the mean"),
        pytest.param([[90, 5, -1], [90, 5, 1], [90, 5, 3]], "channel 0 of output 'out'", 0.0, id="dead elsewhere"),
        pytest.param([[100, 5, 3], [101, 5, 1], [102, 5, -1]], "channel 2 of output 'out'", -1.0, id="upside down"),
        pytest.param([[101, 5, -1], [102, 5, 1], [103, 5, 3]], "channel 0 of output 'out'", 0.632, id="shifted"),
        pytest.param([[100, 5, np.nan], [101, 5, 1], [102, 5, 3]], "channel 2 of output 'out'", -1.0, id="no number"),
    ],
)
def test_each_channel_is_compared_around_floats_mean(ours, worst, similarity):
    found = compare_channels(pairs(ours, EXACT))
    assert (found.worst, round(found.similarity, 3)) == (worst, similarity)


def test_a_float_model_that_never_moves_is_refused_before_anything_is_quantized():
    net = small_net()
    dead = [replace(one, weights=one.kernel * 0) if one.out == "stem" else one for one in net.layers]
    with pytest.raises(InferenceError) as caught:
        judged(Net(tuple(dead), net.input, net.outputs, net.input_shape))
    assert caught.value.message == (
        "cannot judge the model: the float model answers the same to every held-out picture"
    )


def test_a_float_model_without_numbers_is_refused_at_the_step_float():
    net = small_net()
    bias = np.array([0, np.nan, 0, 0, 0], np.float32)
    broken = [replace(one, bias=bias) if one.out == "points" else one for one in net.layers]
    with pytest.raises(InferenceError) as caught:
        judged(Net(tuple(broken), net.input, net.outputs, net.input_shape))
    assert caught.value.message == (
        "cannot accept the model: after the step 'float' output 'scores' holds values that are no numbers"
    )


def test_memory_does_not_grow_with_the_number_of_held_out_pictures(monkeypatch):
    monkeypatch.setattr(judge, "KEPT_BYTES", 0)
    net = detector(second_class=0.5)
    contract = contract_for(net, None)

    def peak(count: int) -> int:
        def many() -> Iterator[np.ndarray]:
            draw = np.random.default_rng(1)
            return (draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for _ in range(count))

        tracemalloc.start()
        try:
            one = Judge(net, contract, many, contract.limits)
            one.judge_file("float again", write_float(net))
            assert one.count == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(2)
    # 360 pictures are 620 kB, and the answers to them 310 kB.
    assert peak(400) - peak(40) < 60_000


def test_answers_that_are_not_kept_give_the_same_figures(monkeypatch):
    net = detector(second_class=0.5)
    runner = judge.Runner(in_int8(net))
    contract = contract_for(net, None)
    kept = judged(net).judge("quantized", lambda picture: contract.answer(runner(picture)))
    monkeypatch.setattr(judge, "KEPT_BYTES", 0)
    assert judged(net).judge("quantized", lambda picture: contract.answer(runner(picture))) == kept


@pytest.mark.parametrize(("count", "has_interval"), [(1, False), (9, False), (10, True)])
def test_few_pictures_give_no_interval(count, has_interval):
    pose = np.stack([np.linspace(0.2, 0.8, 17), np.full(17, 0.5), np.full(17, 0.8)], 1).astype(np.float32)
    poses = compare_poses([pose] * count, [pose] * count)
    scores = compare_scores([np.eye(3)[0]] * count, [np.eye(3)[0]] * count)
    for found, key in ((poses, "distance_low"), (scores, "top1_high")):
        assert (key in found.as_dict()) == has_interval
        assert ("(no interval of fewer than 10 pictures" in found.summary()) != has_interval

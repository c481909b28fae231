"""What a prepared model is held to: its distance from float on held-out pictures, and what its NPU takes of it."""

from __future__ import annotations

import numpy as np
import pytest

from inference.errors import InferenceError
from inference.measure.placement import from_details
from inference.prepare.contract import PoseContract
from inference.prepare.evaluate import Accuracy, compare_poses, compare_scores, require

LIMITS = {"max_distance_mean": 0.03, "max_score_error_mean": 0.2}


def poses(shift: float = 0.0, score: float = 0.8) -> list[np.ndarray]:
    grid = np.stack([np.linspace(0.2, 0.8, 17), np.full(17, 0.5 + shift), np.full(17, score)], 1)
    return [grid.astype(np.float32)] * 12


def test_distance_counts_only_points_the_float_model_is_sure_of():
    exact, ours = poses(), [pose.copy() for pose in poses(0.01)]
    exact = [pose.copy() for pose in exact]
    for pose, mine in zip(exact, ours, strict=True):
        pose[0, 2] = 0.1
        mine[0, :2] = 0
    found = compare_poses(ours, exact)
    assert (found.pictures, found.points) == (12, 192)
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
    contract = PoseContract(np.ones((6, 6), np.float32))
    unsure, clear, half = (contract.clarity(poses(score=score)[0]) for score in (0.4, 0.9, 0.6))
    assert clear > half > unsure


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

"""Decode, crop and comparison of poses, on heads and poses made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from inference.pose import (
    KEYPOINT_NAMES,
    SKELETON,
    Crop,
    decode_heads,
    golden_oks,
    initial_crop,
    next_crop,
    oks,
    to_frame,
)


def random_heads(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {
        "center": draw.random((1, 48, 48, 1), np.float32),
        "regress": draw.normal(0, 12, (1, 48, 48, 34)).astype(np.float32),
        "heatmap": draw.random((1, 48, 48, 17), np.float32),
        "offset": draw.normal(0, 1, (1, 48, 48, 34)).astype(np.float32),
        "centre_weight": draw.random((48, 48), np.float32),
    }


def decode_point_by_point(center, regress, heatmap, offset, centre_weight) -> np.ndarray:
    """MoveNet's decode as its graph states it, one cell at a time."""
    best = max(((center[0, y, x, 0] * centre_weight[y, x]), -y, -x) for y in range(48) for x in range(48))
    row, column = -best[1], -best[2]
    pose = []
    for k in range(17):
        ky = row + regress[0, row, column, 2 * k]
        kx = column + regress[0, row, column, 2 * k + 1]
        scores = [
            (heatmap[0, y, x, k] / (np.sqrt((y - ky) ** 2 + (x - kx) ** 2) + np.float32(1.8)), -y, -x)
            for y in range(48)
            for x in range(48)
        ]
        _, y, x = max(scores)
        y, x = -y, -x
        pose.append(((y + offset[0, y, x, 2 * k]) / 48, (x + offset[0, y, x, 2 * k + 1]) / 48, heatmap[0, y, x, k]))
    return np.array(pose, np.float32)


def standing(centre_y: float = 180, centre_x: float = 320, height: float = 200, score: float = 0.8) -> np.ndarray:
    shape = {
        "nose": (-0.45, 0),
        "left_eye": (-0.47, 0.02),
        "right_eye": (-0.47, -0.02),
        "left_ear": (-0.46, 0.04),
        "right_ear": (-0.46, -0.04),
        "left_shoulder": (-0.3, 0.1),
        "right_shoulder": (-0.3, -0.1),
        "left_elbow": (-0.15, 0.15),
        "right_elbow": (-0.15, -0.15),
        "left_wrist": (0, 0.16),
        "right_wrist": (0, -0.16),
        "left_hip": (0, 0.07),
        "right_hip": (0, -0.07),
        "left_knee": (0.25, 0.07),
        "right_knee": (0.25, -0.07),
        "left_ankle": (0.5, 0.07),
        "right_ankle": (0.5, -0.07),
    }
    points = [(centre_y + height * y, centre_x + height * x, score) for y, x in (shape[n] for n in KEYPOINT_NAMES)]
    return np.array(points, np.float32)


@pytest.mark.parametrize("seed", [1, 2])
def test_decode_equals_the_graph_cell_by_cell(seed):
    heads = random_heads(seed)
    np.testing.assert_allclose(decode_heads(**heads), decode_point_by_point(**heads), rtol=1e-5, atol=1e-6)


def test_decode_takes_heads_with_and_without_a_batch_axis():
    heads = random_heads(3)
    bare = {name: head[0] if head.ndim == 4 else head for name, head in heads.items()}
    np.testing.assert_array_equal(decode_heads(**heads), decode_heads(**bare))


def test_a_strong_far_peak_of_another_person_loses_to_a_weaker_near_one():
    zeros = np.zeros((48, 48, 34), np.float32)
    center, heatmap = np.zeros((48, 48, 1), np.float32), np.zeros((48, 48, 17), np.float32)
    center[20, 20] = 1
    heatmap[21, 21] = 0.4
    heatmap[40, 40] = 0.9
    pose = decode_heads(center, zeros, heatmap, zeros, np.ones((48, 48), np.float32))
    np.testing.assert_allclose(pose, np.tile([21 / 48, 21 / 48, 0.4], (17, 1)), rtol=1e-6)


def test_the_whole_frame_is_centred_in_its_square():
    assert initial_crop((640, 360)) == Crop(0, -140, 640)
    assert initial_crop((360, 640)) == Crop(-140, 0, 640)


def test_points_of_the_crop_become_pixels_of_the_frame():
    pose = np.array([[0.5, 0.25, 0.9]] * 17, np.float32)
    np.testing.assert_allclose(to_frame(pose, Crop(x0=100, y0=-20, size=200))[0], [80, 150, 0.9], rtol=1e-6)


def test_the_crop_is_centred_on_the_hips_and_holds_the_whole_body():
    person = standing()
    crop = next_crop(person, (640, 360))
    assert (crop.x0 + crop.size / 2, crop.y0 + crop.size / 2) == pytest.approx((320, 180))
    assert crop.size == pytest.approx(2 * 1.2 * 100, rel=1e-3)
    assert (person[:, 0] > crop.y0).all()
    assert (person[:, 0] < crop.y0 + crop.size).all()


def test_points_that_are_not_seen_do_not_widen_the_crop():
    person = standing()
    person[KEYPOINT_NAMES.index("left_wrist")] = (0, 639, 0.05)
    assert next_crop(person, (640, 360)) == next_crop(standing(), (640, 360))


@pytest.mark.parametrize("missing", [("left_hip", "right_hip"), ("left_shoulder", "right_shoulder")])
def test_without_a_torso_the_whole_frame_is_searched(missing):
    person = standing()
    for name in missing:
        person[KEYPOINT_NAMES.index(name), 2] = 0.1
    assert next_crop(person, (640, 360)) == initial_crop((640, 360))


def test_a_person_larger_than_the_frame_is_looked_for_in_the_whole_frame():
    assert next_crop(standing(height=2000), (640, 360)) == initial_crop((640, 360))


def test_a_person_the_size_of_a_point_keeps_a_crop_that_can_be_cut():
    assert next_crop(standing(height=0.5), (640, 360)).size >= 32


def test_similarity_is_one_for_equal_poses_and_falls_with_distance():
    person = standing()
    near, far = person.copy(), person.copy()
    near[:, 1] += 4
    far[:, 1] += 60
    assert oks(person, person) == 1.0
    assert 0.5 < oks(near, person) < 1.0
    assert oks(far, person) < 0.3


def test_similarity_looks_only_at_points_the_reference_sees():
    person, moved = standing(), standing()
    person[0, 2] = 0.1
    moved[0, :2] = 0
    assert oks(moved, person) == 1.0


def test_nobody_in_the_reference_or_a_pose_that_is_not_a_number_is_not_similar():
    assert oks(standing(), standing(score=0.1)) == 0.0
    assert oks(np.full((17, 3), np.nan, np.float32), standing()) == 0.0


def test_a_pose_in_the_right_place_that_sees_nothing_fails_the_golden_frame():
    assert oks(standing(score=0.01), standing()) == 1.0
    assert golden_oks(standing(score=0.01), standing()) == 0.0
    assert golden_oks(standing(score=0.7), standing()) == 1.0


def test_the_skeleton_joins_every_point():
    assert {row for edge in SKELETON for row in edge} == set(range(17))
    assert len(set(SKELETON)) == len(SKELETON)

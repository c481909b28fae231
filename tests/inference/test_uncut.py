"""MoveNet with its own decode: it computes what ours does, and shows what the cut saves on an NPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inference.pose import decode_heads
from inference.prepare.pictures import load_pictures
from inference.prepare.ranges import VARIANTS
from inference.prepare.run import Runner
from inference.prepare.tfjs import MoveNet, read_movenet
from inference.prepare.uncut import compute, write_uncut
from inference.prepare.writer import write_float

ASSETS = Path(__file__).parents[2] / "build" / "assets"
SIDE = 192


@pytest.fixture(scope="module")
def movenet() -> MoveNet:
    if not (ASSETS / "movenet-lightning.json").exists():
        pytest.skip("no weights and pictures: run `make model`")
    return read_movenet(ASSETS / "movenet-lightning.json")


@pytest.fixture(scope="module")
def poses(movenet: MoveNet) -> list[tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]]:
    """Held-out pictures, the float heads and the pose that our decode makes of them."""
    runner = Runner(write_float(movenet.net))
    found = []
    for picture in list(load_pictures(ASSETS / "heldout", SIDE))[:12]:
        heads = runner(picture)
        names = ("center", "regress", "heatmap", "offset")
        found.append((picture, heads, decode_heads(*(heads[name] for name in names), movenet.centre_weight)))
    return found


def test_the_graphs_own_decode_gives_the_pose_that_ours_gives(movenet, poses):
    for _, heads, ours in poses:
        values = {**movenet.decode.constants, **{name: heads[head] for head, name in movenet.decode.heads.items()}}
        for step in movenet.decode.steps:
            values.update(zip(step.outs, compute(step, [values[name] for name in step.inputs]), strict=True))
        np.testing.assert_allclose(values[movenet.decode.output][0, 0], ours, atol=1e-3)


def test_the_whole_graph_in_int8_runs_and_stays_near_float(movenet, poses):
    calibration = list(load_pictures(ASSETS / "calibration", SIDE))
    runner = Runner(write_uncut(movenet.net, movenet.decode, lambda: calibration, VARIANTS["percentile"]))
    distances = []
    for picture, _, ours in poses:
        sure = ours[:, 2] > 0.3
        distances.append(np.hypot(*(runner(picture)["keypoints"][0, 0] - ours)[sure, :2].T).mean())
    assert np.mean(distances) < 0.02

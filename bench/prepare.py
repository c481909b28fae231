"""What each way of making MoveNet INT8 costs against float, on held-out crops of the video that stands for a camera.

Five models from the same calibration pictures: float, one scale per channel, one scale per tensor done naively, ours
with one per tensor, and the same carefulness per channel. Each runs with XNNPACK and with the reference kernels,
because INT8 results differ between them. Every place of the held-out list is cut three times (as it is, shifted,
wider), so that 117 crops judge. Where pictures with COCO keypoints are given, OKS is measured too. Writes
build/bench/prepare.json.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from inference.errors import InferenceError
from inference.pose import Crop, oks
from inference.prepare import pictures
from inference.prepare.calibrate import extremes
from inference.prepare.contract import Contract
from inference.prepare.download import read_member
from inference.prepare.evaluate import Accuracy, compare_poses
from inference.prepare.fetch import VIDEO
from inference.prepare.graph import Array
from inference.prepare.progress import bar
from inference.prepare.quantize import round_all, write_int8
from inference.prepare.ranges import VARIANTS
from inference.prepare.recipe import RECIPES, quantize
from inference.prepare.run import Kernels, Runner
from inference.prepare.source import Source, read_source
from inference.prepare.uncut import write_uncut
from inference.prepare.vela import compile_for
from inference.prepare.writer import write_float
from inference.tensors import cut

ROOT = Path(__file__).parents[1]
LIMIT = 0.012
LIMIT_FACTOR = 1.5
LIMIT_MIB = 1024
OURS, PER_CHANNEL = "per tensor, ours", "per channel"
_VARIATIONS = ((0.0, 0.0, 1.0), (0.08, -0.06, 1.0), (-0.05, 0.05, 1.2))


def held_out_crops(side: int) -> list[Array]:
    """Every held-out place three times."""
    video = read_member(VIDEO, "Sports2D/Demo/demo.mp4")
    with tempfile.TemporaryDirectory() as scratch:
        frames = pictures.decode_video(video, Path(scratch))
    crops = []
    for frame, x0, y0, size in pictures.HELD_OUT:
        for right, down, wider in _VARIATIONS:
            grown = size * wider
            x, y = x0 + size * right - (grown - size) / 2, y0 + size * down - (grown - size) / 2
            crops.append(cut(frames[frame], Crop(x, y, grown), side))
    return crops


def labelled_people(folder: Path | None, side: int) -> list[tuple[Array, Array, float]]:
    """Crops of labelled persons, their keypoints in the crop's fractions (y, x, visible) and their areas there."""
    people = []
    for path in sorted(folder.glob("*.json")) if folder else []:
        document = json.loads(path.read_text())
        names = {image["id"]: image["file_name"] for image in document["images"]}
        for person in document["annotations"]:
            if person["num_keypoints"] < 12:
                continue
            with Image.open(path.parent / names[person["image_id"]]) as picture:
                frame = np.asarray(picture.convert("RGB"))
            left, top, width, height = person["bbox"]
            size = 1.25 * max(width, height)
            crop = Crop(left + width / 2 - size / 2, top + height / 2 - size / 2, size)
            x, y, seen = np.array(person["keypoints"], np.float64).reshape(17, 3).T
            points = np.stack([(y - crop.y0) / size, (x - crop.x0) / size, np.minimum(seen, 1)], 1)
            people.append((cut(frame, crop, side), points.astype(np.float32), person["area"] / size**2))
    return people


def make_models(source: Source, folder: Path) -> tuple[dict[str, bytes], dict[str, float]]:
    """The five files, and how long each took, in seconds of CPU."""
    net = source.net
    calibration = list(pictures.load_pictures(folder, source.side))

    def passes() -> Sequence[Array]:
        return calibration

    def ignore(step: str, content: bytes) -> None:
        """This measures what `prepare` would refuse, too."""

    def recipe(**changes: Any) -> Callable[[], bytes]:
        own = replace(RECIPES["imx8mp-vx"], **changes)
        return lambda: quantize(net, passes, own, VARIANTS["percentile"], ignore)

    ways: dict[str, Callable[[], bytes]] = {
        "float": lambda: write_float(net),
        PER_CHANNEL: recipe(per_channel=True, careful=False),
        "per channel, careful": recipe(per_channel=True),
        "per tensor, naive": lambda: write_int8(net, extremes(net, passes), codes=round_all(net, per_channel=False)),
        OURS: recipe(),
    }
    files, seconds = {}, {}
    for name, way in ways.items():
        started = time.process_time()
        files[name] = way()
        seconds[name] = round(time.process_time() - started, 1)
    return files, seconds


def measure(contract: Contract, content: bytes, kernels: Kernels, crops: Sequence[Array]) -> list[Array]:
    """The poses of one file."""
    runner = Runner(content, kernels)
    return [contract.answer(runner(crop)) for crop in bar(crops, kernels.name.lower())]


def main() -> int:
    """0 when ours keeps its limit and the memory its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, default=ROOT / "build/assets")
    parser.add_argument(
        "--labelled", type=Path, metavar="DIR", help="pictures with COCO keypoints as .json beside them"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build/bench/prepare.json")
    arguments = parser.parse_args()
    source = read_source(arguments.assets / "movenet-lightning.json")
    crops = held_out_crops(source.side)
    people = labelled_people(arguments.labelled, source.side)
    files, seconds = make_models(source, arguments.assets / "calibration")
    peak_mib = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    exact = measure(source.contract, files["float"], Kernels.FAST, crops)
    print(f"{len(crops)} held-out crops, {len(people)} labelled people, load {os.getloadavg()[0]:.1f}")
    print(f"{'':22}{'kernels':>11}{'distance':>10}{'95 % of it':>18}{'score error':>13}{'OKS':>7}{'CPU s':>7}")
    rows: dict[str, dict[str, Any]] = {}
    for name, content in files.items():
        for kernels in Kernels:
            found = compare_poses(measure(source.contract, content, kernels, crops), exact)
            row = {**found.as_dict(), "oks": _oks(source.contract, content, kernels, people)}
            rows.setdefault(name, {"cpu_s": seconds[name]})[kernels.name.lower()] = row
            _show(name, kernels, found, row["oks"], seconds[name])
    placement = _placement(source, files[PER_CHANNEL], arguments.assets / "calibration")
    ours, channel = (rows[name]["fast"]["distance_mean"] for name in (OURS, PER_CHANNEL))
    limit = max(LIMIT, LIMIT_FACTOR * channel)
    print(f"ours {ours:.4f}, at most {limit:.4f}; the recipes took at most {peak_mib} MiB, at most {LIMIT_MIB}")
    figures = {
        "crops": len(crops),
        "labelled": len(people),
        "models": rows,
        "limit": round(limit, 5),
        "peak_mib": peak_mib,
        "placement": placement,
        "load_average": os.getloadavg()[0],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if ours <= limit and peak_mib <= LIMIT_MIB else 1


def _show(name: str, kernels: Kernels, found: Accuracy, similarity: float | None, seconds: float) -> None:
    said = "xnnpack" if kernels is Kernels.FAST else "reference"
    interval = f"{found.distance_low:.4f}..{found.distance_high:.4f}"
    shown = "-" if similarity is None else f"{similarity:.3f}"
    print(
        f"{name:22}{said:>11}{found.distance_mean:>10.4f}{interval:>18}{found.score_error_mean:>13.3f}"
        f"{shown:>7}{seconds:>7.1f}",
        flush=True,
    )


def _oks(
    contract: Contract, content: bytes, kernels: Kernels, people: Sequence[tuple[Array, Array, float]]
) -> float | None:
    if not people:
        return None
    poses = measure(contract, content, kernels, [crop for crop, _, _ in people])
    return round(
        float(np.mean([oks(pose, points, area) for pose, (_, points, area) in zip(poses, people, strict=True)])), 4
    )


def _placement(source: Source, heads: bytes, folder: Path) -> dict[str, Any]:
    """What an Ethos-U takes of the model cut at its heads, and of the whole graph."""
    if source.decode is None:
        raise AssertionError("MoveNet's graph has a decode of its own")
    calibration = list(pictures.load_pictures(folder, source.side))
    whole = write_uncut(source.net, source.decode, lambda: calibration, VARIANTS["percentile"])
    found = {}
    try:
        for name, content in {"cut at its heads": heads, "whole": whole}.items():
            compiled = compile_for(content, RECIPES["imx93-ethosu"].vela)
            print(f"Ethos-U65, {name}: {compiled.placement.counts()}: {compiled.placement.summary()}")
            found[name] = compiled.placement.as_dict()
    except InferenceError as error:
        print(f"Ethos-U65: {error.message}")
    return found


if __name__ == "__main__":
    sys.exit(main())

"""MoveNet from its float graph to a model folder: the steps in order, and the document they fill."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from inference import litert
from inference.accelerator import load_accelerator
from inference.errors import InferenceError
from inference.measure.placement import place
from inference.model import write_document
from inference.pose import decode_heads
from inference.prepare.evaluate import MAX_DISTANCE, clearest, compare, require
from inference.prepare.graph import Array
from inference.prepare.pictures import list_pictures, load_pictures
from inference.prepare.quantize import write_int8
from inference.prepare.recipe import CPU, RECIPES, VARIANTS, Recipe, movenet_ranges, recipe_for
from inference.prepare.run import Kernels, Runner
from inference.prepare.tfjs import MoveNet, read_movenet
from inference.prepare.writer import write_float

HEADS = ("center", "regress", "heatmap", "offset")
# The same kernels give the same pose; another CPU's kernels, or an NPU's rounding, move a point by a few pixels.
OKS_MIN = 0.85
_BUILT_HERE = Path("build/simnpu/libsimnpu.so")
_TOOLS = ("avocado-agent", "ai-edge-litert", "flatbuffers", "numpy")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What to prepare, from what, for whom."""

    source: Path
    target: str
    calibration: Path
    held_out: Path
    out: Path
    variant: str
    delegate: Path | None = None


def prepare_movenet(job: Job, say: Say) -> None:
    """Write the model folder `job.out`; it appears complete or not at all."""
    recipe = recipe_for(job.target)
    movenet = read_movenet(job.source)
    side = movenet.net.input_shape[1]
    say(f"read {job.source}: {len(movenet.net.layers)} layers down to the heads")
    held_out = list(load_pictures(job.held_out, side))
    content = _quantized(job, movenet, recipe, say)
    float_poses = [_decode(movenet, heads) for heads in Runner(write_float(movenet.net)).over(held_out)]
    golden = clearest(held_out, float_poses)

    job.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=job.out.parent, prefix=".prepare-") as scratch:
        folder = Path(scratch) / job.out.name
        folder.mkdir()
        (folder / "cpu.tflite").write_bytes(content)
        np.save(folder / "golden.npy", golden)
        np.save(folder / "centre_weight.npy", movenet.centre_weight)
        document = _describe(job, recipe, movenet)
        for accelerator in sorted({CPU, job.target}):
            posing, how = _posing(job, accelerator, folder, movenet, content)
            accuracy = compare([posing(picture) for picture in held_out], float_poses)
            require(accuracy, "quantized")
            say(
                f"{accelerator} ({how}): {accuracy.points} points on {accuracy.pictures} held-out pictures, distance "
                f"to float {accuracy.distance_mean:.4f} (p95 {accuracy.distance_p95:.4f}), score error "
                f"{accuracy.score_error_mean:.3f}"
            )
            _record(document, accelerator, folder, golden=posing(golden), accuracy=accuracy.as_dict(), how=how)
        _record_placement(document, job, folder, say)
        document["digests"] = {name: _sha256(folder / name) for name in ("golden.npy", "centre_weight.npy")}
        write_document(folder, document)
        shutil.rmtree(job.out, ignore_errors=True)
        folder.rename(job.out)
    say(f"wrote {job.out}: version {document['version']}, {len(content)} bytes of INT8")


def _quantized(job: Job, movenet: MoveNet, recipe: Recipe, say: Say) -> bytes:
    side = movenet.net.input_shape[1]
    count = len(list_pictures(job.calibration))

    def pictures() -> Any:
        return tqdm(
            load_pictures(job.calibration, side),
            desc="calibrate",
            total=count,
            unit="picture",
            disable=None,
            leave=False,
        )

    ranges = movenet_ranges(movenet.net, pictures, VARIANTS[job.variant])
    say(f"learned the ranges of {len(ranges)} tensors from {count} pictures (variant {job.variant})")
    return write_int8(movenet.net, ranges, per_channel=recipe.per_channel)


def _decode(movenet: MoveNet, heads: Mapping[str, Array]) -> Array:
    center, regress, heatmap, offset = (heads[name] for name in HEADS)
    return decode_heads(center, regress, heatmap, offset, movenet.centre_weight)


def _posing(
    job: Job, accelerator: str, folder: Path, movenet: MoveNet, content: bytes
) -> tuple[Callable[[Array], Array], str]:
    """Picture to pose as this accelerator would, and in what way that was possible here."""
    delegate = None
    how = "XNNPACK"
    if accelerator != CPU:
        delegate = _delegate(job, accelerator)
        if delegate is None:
            reference = Runner(content, Kernels.REFERENCE)
            return (lambda picture: _decode(movenet, reference(picture))), "reference kernels, no delegate here"
        how = "its delegate"
    side = movenet.net.input_shape[1]
    backend = litert.prepare(folder / "cpu.tflite", delegate, 1, movenet.net.input, HEADS, side)
    return (lambda picture: _decode(movenet, backend.infer(picture[None]))), how


def _delegate(job: Job, accelerator: str) -> Any | None:
    """The accelerator's delegate with its profile's options, where this machine has it."""
    profile = load_accelerator(accelerator).delegate
    if profile is None:
        return None
    path = job.delegate or Path(profile.path)
    if not path.exists() and accelerator == "virtual":
        path = _BUILT_HERE
    if not path.exists():
        if job.delegate is not None:
            raise InferenceError(f"cannot load delegate {job.delegate}: it does not exist")
        return None
    # The board's node and control file are the board's; the operators it claims are what matters here.
    options = {key: value for key, value in profile.options.items() if key in ("ops", "max_nodes")}
    return litert.create_delegate(str(path), options)


def _describe(job: Job, recipe: Recipe, movenet: MoveNet) -> dict[str, Any]:
    variant = VARIANTS[job.variant]
    pictures = list_pictures(job.calibration)
    return {
        "schema": 1,
        "name": job.source.stem,
        "version": variant.version,
        "task": "pose",
        "input": {"name": movenet.net.input, "shape": list(movenet.net.input_shape), "dtype": "uint8"},
        "output": {
            "kind": "movenet-heads",
            "names": {name: name for name in HEADS},
            "centre_weight": "centre_weight.npy",
        },
        "files": {},
        "golden": {"frame": "golden.npy", "poses": {}, "oks_min": {}, "made_with": {}},
        "calibration": {
            "variant": job.variant,
            "head_percentile": variant.head_percentile,
            "pictures": len(pictures),
            "sha256": _digest_of(pictures),
        },
        "accuracy": {
            "against": "float32",
            "max_distance_mean": MAX_DISTANCE,
            "held_out_sha256": _digest_of(list_pictures(job.held_out)),
        },
        "placement": {},
        "requirements": dict(recipe.requirements),
    }


def _record(
    document: dict[str, Any], accelerator: str, folder: Path, *, golden: Array, accuracy: Mapping[str, float], how: str
) -> None:
    document["files"][accelerator] = {
        "path": "cpu.tflite",
        "sha256": _sha256(folder / "cpu.tflite"),
        "recipe": RECIPES[accelerator].name,
        "toolchain": {tool: metadata.version(tool) for tool in _TOOLS},
    }
    document["golden"]["poses"][accelerator] = [[round(float(value), 5) for value in row] for row in golden]
    document["golden"]["oks_min"][accelerator] = OKS_MIN
    document["golden"]["made_with"][accelerator] = how
    document["accuracy"][accelerator] = dict(accuracy)


def _record_placement(document: dict[str, Any], job: Job, folder: Path, say: Say) -> None:
    if job.target == CPU:
        return
    delegate = _delegate(job, job.target)
    if delegate is None:
        say(f"placement on {job.target}: unknown, its delegate is not on this machine")
        return
    placement = place(folder / "cpu.tflite", delegate)
    document["placement"][job.target] = placement.as_dict()
    say(f"placement on {job.target}: {placement.summary()}")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest_of(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()

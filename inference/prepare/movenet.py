"""MoveNet from its float graph to a model folder: the steps in order, and the document they fill."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from inference.prepare.calibrate import Pictures
from inference.prepare.evaluate import MAX_DISTANCE, Accuracy, clearest, compare, require
from inference.prepare.graph import Array
from inference.prepare.pictures import list_pictures, load_pictures
from inference.prepare.recipe import CPU, RECIPES, VARIANTS, Recipe, quantize, recipe_for
from inference.prepare.run import Kernels, Runner
from inference.prepare.tfjs import MoveNet, read_movenet
from inference.prepare.vela import Compiled, compile_for, find_vela
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
    if recipe.vela:
        find_vela()
    movenet = read_movenet(job.source)
    side = movenet.net.input_shape[1]
    say(f"read {job.source}: {len(movenet.net.layers)} layers down to the heads")
    held_out = list(load_pictures(job.held_out, side))
    files = _quantized(job, movenet, say)
    float_poses = [_decode(movenet, heads) for heads in Runner(write_float(movenet.net)).over(held_out)]
    golden = clearest(held_out, float_poses)

    job.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=job.out.parent, prefix=".prepare-") as scratch:
        folder = Path(scratch) / job.out.name
        folder.mkdir()
        np.save(folder / "golden.npy", golden)
        np.save(folder / "centre_weight.npy", movenet.centre_weight)
        document = _describe(job, recipe, movenet)
        for accelerator, file in files.items():
            path = folder / file.name
            path.write_bytes(file.content)
            posing, how = _posing(job, accelerator, file, path, movenet)
            accuracy = compare([posing(picture) for picture in held_out], float_poses)
            say(f"{accelerator} ({how}): {accuracy.summary()}")
            require(accuracy, f"quantized for {accelerator}")
            _record(document, accelerator, file, path, _Judged(posing(golden), accuracy, how))
        if job.target != CPU:
            _record_placement(document, job, files[job.target], folder, say)
        document["digests"] = {name: _sha256(folder / name) for name in ("golden.npy", "centre_weight.npy")}
        write_document(folder, document)
        shutil.rmtree(job.out, ignore_errors=True)
        folder.rename(job.out)
    say(f"wrote {job.out}: version {document['version']} for {', '.join(files)}")


@dataclass(frozen=True, slots=True)
class _File:
    """What an accelerator loads; `int8` is the same before it was compiled into something only an NPU runs."""

    name: str
    content: bytes
    int8: bytes
    compiled: Compiled | None = None


def _quantized(job: Job, movenet: MoveNet, say: Say) -> dict[str, _File]:
    """One file for the CPU and one for the target; the same one where their recipes make the same bytes."""
    passes = _passes(job, movenet.net.input_shape[1])
    made: dict[tuple[bool, bool], _File] = {}
    files: dict[str, _File] = {}
    for accelerator in dict.fromkeys((CPU, job.target)):
        recipe = recipe_for(accelerator)
        key = (recipe.per_channel, recipe.careful)
        if key not in made:
            content = quantize(movenet.net, passes, recipe, VARIANTS[job.variant])
            made[key] = _File(f"{accelerator}.tflite", content, content)
            scales = "channel" if recipe.per_channel else "tensor"
            say(f"{accelerator}: INT8 with one scale per {scales}, variant {job.variant}")
        files[accelerator] = made[key]
        if recipe.vela:
            compiled = compile_for(made[key].int8, recipe.vela)
            files[accelerator] = _File(f"{accelerator}.tflite", compiled.content, made[key].int8, compiled)
            say(f"{accelerator}: compiled for {recipe.vela}, estimated {compiled.estimate_ms:.1f} ms a frame")
    return files


def _passes(job: Job, side: int) -> Pictures:
    """Reads the calibration pictures anew for every pass over them, with a bar on a terminal."""
    count = len(list_pictures(job.calibration))

    def once() -> Iterable[Array]:
        pictures = load_pictures(job.calibration, side)
        bar: Iterable[Array] = tqdm(pictures, "calibrate", count, unit="picture", disable=None, leave=False)
        return bar

    return once


def _decode(movenet: MoveNet, heads: Mapping[str, Array]) -> Array:
    center, regress, heatmap, offset = (heads[name] for name in HEADS)
    return decode_heads(center, regress, heatmap, offset, movenet.centre_weight)


def _posing(
    job: Job, accelerator: str, file: _File, path: Path, movenet: MoveNet
) -> tuple[Callable[[Array], Array], str]:
    """Picture to pose as this accelerator would, and in what way that was possible here."""
    delegate = None if accelerator == CPU else _delegate(job, accelerator)
    if accelerator != CPU and delegate is None:
        reference = Runner(file.int8, Kernels.REFERENCE)
        return (lambda picture: _decode(movenet, reference(picture))), "reference kernels, its delegate is not here"
    side = movenet.net.input_shape[1]
    backend = litert.prepare(path, delegate, 1, movenet.net.input, HEADS, side)
    how = "XNNPACK" if delegate is None else "its delegate"
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


@dataclass(frozen=True, slots=True, eq=False)
class _Judged:
    golden: Array
    accuracy: Accuracy
    how: str


def _record(document: dict[str, Any], accelerator: str, file: _File, path: Path, judged: _Judged) -> None:
    toolchain = {tool: metadata.version(tool) for tool in _TOOLS}
    if file.compiled is not None:
        toolchain["ethos-u-vela"] = file.compiled.version
    document["files"][accelerator] = {
        "path": path.name,
        "sha256": _sha256(path),
        "recipe": RECIPES[accelerator].name,
        "toolchain": toolchain,
    }
    document["golden"]["poses"][accelerator] = [[round(float(value), 5) for value in row] for row in judged.golden]
    document["golden"]["oks_min"][accelerator] = OKS_MIN
    document["golden"]["made_with"][accelerator] = judged.how
    document["accuracy"][accelerator] = judged.accuracy.as_dict()


def _record_placement(document: dict[str, Any], job: Job, file: _File, folder: Path, say: Say) -> None:
    if file.compiled is not None:
        placement = file.compiled.placement
    else:
        delegate = _delegate(job, job.target)
        if delegate is None:
            say(f"placement on {job.target}: unknown, its delegate is not on this machine")
            return
        placement = place(folder / file.name, delegate)
    document["placement"][job.target] = placement.as_dict()
    say(f"placement on {job.target}: {placement.summary()}")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest_of(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()

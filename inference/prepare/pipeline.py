"""From a float model to a model folder: the steps in order, each judged, and the document they fill.

Read, learn ranges, quantize, compile, run, see what the accelerator takes. Every step that changes the model is
compared with the float one on held-out pictures, so that a refusal names the step that broke it. One folder carries the
files of several accelerators, and the CPU's always; it appears complete or not at all, and the same input gives the
same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from inference import litert
from inference.accelerator import load_accelerator
from inference.errors import InferenceError
from inference.installed import installed_versions
from inference.measure.placement import Placement, place
from inference.model import write_document
from inference.prepare.calibrate import Pictures
from inference.prepare.destination import Destination, open_destination
from inference.prepare.document import (
    PLACEMENT,
    check_version,
    digest_of,
    refuse_overlap,
    refuse_unjudged,
    requirements_for,
    sha256,
    slug,
    toolchain,
)
from inference.prepare.judge import Answering, Judge
from inference.prepare.made_for import made_for
from inference.prepare.neutron import convert_for, find_converter
from inference.prepare.pictures import list_pictures, repeatedly
from inference.prepare.progress import bar
from inference.prepare.ranges import VARIANTS
from inference.prepare.recipe import CPU, RECIPES, Recipe, quantize
from inference.prepare.run import Kernels, Runner
from inference.prepare.source import Source, check_source, read_source
from inference.prepare.uncut import write_uncut
from inference.prepare.vela import Compiled, compile_for, find_vela

_FEW_PICTURES = 30
_FIRST_VERSION = "1.0"
_BUILT_HERE = Path("build/simnpu/libsimnpu.so")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What to prepare, from what, for which accelerators."""

    source: Path
    targets: tuple[str, ...]
    calibration: Path
    held_out: Path
    out: Path
    variant: str = "percentile"
    version: str = ""
    delegate: Path | None = None
    input_range: tuple[float, float] | None = None
    dequantize: bool = False
    per_tensor: bool = False
    asked: Mapping[str, float | str] = field(default_factory=dict)

    @property
    def accelerators(self) -> tuple[str, ...]:
        """The CPU and every target, each once."""
        return tuple(dict.fromkeys((CPU, *self.targets)))

    def recipe(self, accelerator: str) -> Recipe:
        """How that accelerator's file is made."""
        recipe = RECIPES[accelerator]
        return recipe.with_one_scale_per_tensor() if self.per_tensor and accelerator != CPU else recipe


@dataclass(frozen=True, slots=True)
class _File:
    """What an accelerator loads; `int8` is the same before it was compiled into something only an NPU runs."""

    name: str
    content: bytes
    int8: bytes
    compiled: Compiled | None = None


class How(StrEnum):
    """In what way an accelerator's answer could be had on this machine."""

    XNNPACK = "XNNPACK"
    DELEGATE = "its delegate"
    REFERENCE = "reference kernels, its delegate is not here"

    @property
    def step(self) -> str:
        """What is to blame when the answer is wrong."""
        return "run by its delegate" if self is How.DELEGATE else "quantized"


def prepare_model(job: Job, say: Say) -> None:
    """Write the model folder `job.out`."""
    for accelerator in job.accelerators:
        _find_compiler(job.recipe(accelerator))
    check_version(job.version)
    _refuse_uncounted(job)
    with open_destination(job.out, (job.source, job.calibration, job.held_out)) as destination:
        version = _fill(job, destination, say)
        destination.replace()
    say(f"wrote {job.out}: version {version} for {', '.join(job.accelerators)}")


def _fill(job: Job, destination: Destination, say: Say) -> str:
    """Make the model in the destination's new folder; its version."""
    source = read_source(job.source, input_range=job.input_range, dequantize=job.dequantize)
    say(f"read {job.source}: {source.contract.task}, {len(source.net.layers)} layers")
    if destination.earlier:
        say(f"{job.out}: {destination.earlier.replaced_by(job.accelerators)}")
    refuse_unjudged(source.contract.task, source.contract.limits, job.asked)
    requirements = requirements_for(job.targets, source.contract.limits, job.asked)
    refuse_overlap(list_pictures(job.calibration), list_pictures(job.held_out))
    held_out = repeatedly(job.held_out, source.side)
    judge = Judge(source.net, source.contract, held_out, requirements["accuracy"])
    if judge.count < _FEW_PICTURES:
        say(f"warning: {judge.count} held-out pictures say little; give {_FEW_PICTURES} or more")
    if line := check_source(source, held_out()):
        say(line)
    files = _quantized(job, source, judge, say)
    folder = destination.folder
    arrays = {"golden.npy": judge.golden, **source.contract.arrays()}
    with destination.writing():
        for name, array in arrays.items():
            np.save(folder / name, array)
        for file in files.values():
            (folder / file.name).write_bytes(file.content)
    document = _describe(job, source, requirements)
    answers = {}
    for accelerator, file in files.items():
        answering, how = _answering(job, accelerator, file, folder / file.name, source)
        agreement = judge.judge(f"{how.step} for {accelerator}", answering)
        say(f"{accelerator} ({how}): {agreement.summary()}")
        answers[accelerator] = answering(judge.golden)
        document["accuracy"][accelerator] = agreement.as_dict()
        document["golden"]["made_with"][accelerator] = how
        document["files"][accelerator] = _entry(job, accelerator, file)
        _record_placement(document, job, accelerator, (file, folder), say)
        if file.compiled and source.decode:
            uncut = write_uncut(source.net, source.decode, _passes(job, source.side), VARIANTS[job.variant])
            _show_uncut(_compile(job.recipe(accelerator), uncut), say)
    document["golden"] |= source.contract.golden(answers)
    document["digests"] = {name: sha256(folder / name) for name in arrays}
    with destination.writing():
        write_document(folder, document)
    return str(document["version"])


def _find_compiler(recipe: Recipe) -> None:
    """Refuse before any work when what a recipe calls is not here."""
    if recipe.vela:
        find_vela()
    if recipe.neutron:
        find_converter()


def _refuse_uncounted(job: Job) -> None:
    """A limit on the placement holds only where somebody can count."""
    asked = [key for key in PLACEMENT if key in job.asked]
    if not asked:
        return
    npus = [name for name in job.targets if name != CPU]
    if not npus:
        raise InferenceError(f"cannot require {asked[0]}: there is no NPU among the targets", "add its --target")
    for name in npus:
        recipe = job.recipe(name)
        if not (recipe.vela or recipe.neutron or _library(name, job.delegate)):
            raise InferenceError(
                f"cannot require {asked[0]} on {name}: its delegate is not on this machine, and nobody else can count",
                "name its library with --delegate, or ask `avocado-infer place` on the board",
            )


def _quantized(job: Job, source: Source, judge: Judge, say: Say) -> dict[str, _File]:
    """One file for the CPU and one for each target; the same one where their recipes make the same bytes."""
    passes = _passes(job, source.side)
    made: dict[tuple[bool, bool], _File] = {}
    files: dict[str, _File] = {}
    for accelerator in job.accelerators:
        recipe = job.recipe(accelerator)
        key = (recipe.per_channel, recipe.careful)
        if key not in made:
            content = quantize(source.net, passes, recipe, VARIANTS[job.variant], judge.judge_file)
            made[key] = _File(f"{accelerator}.tflite", content, content)
            scales = "channel" if recipe.per_channel else "tensor"
            say(f"{accelerator}: INT8 with one scale per {scales}, variant {job.variant}")
        compiled = _compile(recipe, made[key].int8)
        files[accelerator] = made[key]
        if compiled is not None:
            files[accelerator] = _File(f"{accelerator}.tflite", compiled.content, made[key].int8, compiled)
            estimate = "" if compiled.estimate_ms is None else f", estimated {compiled.estimate_ms:.1f} ms a frame"
            say(f"{accelerator}: compiled by {compiled.tool} {compiled.version}{estimate}")
    return files


def _compile(recipe: Recipe, content: bytes) -> Compiled | None:
    if recipe.vela:
        return compile_for(content, recipe.vela)
    if recipe.neutron:
        return convert_for(content, recipe.neutron)
    return None


def _passes(job: Job, side: int) -> Pictures:
    """Passes over the calibration pictures, counted."""
    pictures, count = repeatedly(job.calibration, side), len(list_pictures(job.calibration))
    return lambda: bar(pictures(), "calibrate", total=count)


def _answering(job: Job, accelerator: str, file: _File, path: Path, source: Source) -> tuple[Answering, How]:
    """Picture to answer as this accelerator would, and in what way that was possible here."""
    contract = source.contract
    delegate = None if accelerator == CPU else find_delegate(accelerator, job.delegate)
    if accelerator != CPU and delegate is None:
        reference = Runner(file.int8, Kernels.REFERENCE)
        return (lambda picture: contract.answer(reference(picture))), How.REFERENCE
    backend = litert.prepare(path, delegate, 1, source.net.input, contract.names, source.side)
    how = How.XNNPACK if delegate is None else How.DELEGATE
    return (lambda picture: contract.answer(backend.infer(picture[None]))), how


def find_delegate(accelerator: str, named: Path | None) -> Any | None:
    """The accelerator's delegate with its profile's options, where this machine has it."""
    profile = load_accelerator(accelerator).delegate
    path = _library(accelerator, named)
    if profile is None or path is None:
        return None
    # The board's node and control file are the board's; the operators it claims are what matters here.
    options = {key: value for key, value in profile.options.items() if key in ("ops", "max_nodes")}
    return litert.create_delegate(str(path), options)


def _library(accelerator: str, named: Path | None) -> Path | None:
    profile = load_accelerator(accelerator).delegate
    if profile is None:
        return None
    path = named or Path(profile.path)
    if not path.exists() and accelerator == "virtual":
        path = _BUILT_HERE
    if not path.exists():
        if named is not None:
            raise InferenceError(f"cannot load delegate {named}: it does not exist")
        return None
    return path


def _pairing(accelerator: str, content: bytes, library: Path | None) -> dict[str, str]:
    """What the file asks of its board: what it says itself, and what it was tried with on this machine."""
    if library is None:
        return made_for(content)
    told = {what: one.model_dump() for what, one in load_accelerator(accelerator).pairing.items() if not one.text}
    return installed_versions(told, str(library)) | made_for(content)


def _describe(job: Job, source: Source, requirements: Mapping[str, Any]) -> dict[str, Any]:
    variant = VARIANTS[job.variant]
    pictures = list_pictures(job.calibration)
    return {
        "schema": 1,
        "name": slug(job.source.stem),
        "version": job.version or (variant.version if source.decode else _FIRST_VERSION),
        "task": source.contract.task,
        "input": {"name": source.net.input, "shape": list(source.net.input_shape), "dtype": "uint8"},
        "output": source.contract.output(),
        "files": {},
        "golden": {"frame": "golden.npy", "made_with": {}},
        "calibration": {
            "variant": job.variant,
            "head_percentile": variant.head_percentile,
            "pictures": len(pictures),
            "sha256": digest_of(pictures),
        },
        "accuracy": {"against": "float32", "held_out_sha256": digest_of(list_pictures(job.held_out))},
        "placement": {},
        "requirements": dict(requirements),
    }


def _entry(job: Job, accelerator: str, file: _File) -> dict[str, Any]:
    compiled = file.compiled
    return {
        "path": file.name,
        "sha256": hashlib.sha256(file.content).hexdigest(),
        "recipe": job.recipe(accelerator).name,
        "toolchain": toolchain(compiled.tool, compiled.version) if compiled else toolchain(),
        "pairing": _pairing(accelerator, file.content, _library(accelerator, job.delegate)),
    }


def _record_placement(document: dict[str, Any], job: Job, accelerator: str, made: tuple[_File, Path], say: Say) -> None:
    file, folder = made
    if accelerator == CPU:
        return
    placement = _placement(job, accelerator, file, folder)
    if placement is None:
        say(f"placement on {accelerator}: unknown, its delegate is not on this machine")
        return
    document["placement"][accelerator] = placement.as_dict()
    compiled = f"{placement.counts()}: " if file.compiled else ""
    say(f"placement on {accelerator}: {compiled}{placement.summary()}")
    for name, reason in placement.reasons.items():
        say(f"  {name} stays on the CPU: {reason}")
    if excess := placement.excess(document["requirements"]["accelerators"][accelerator]):
        raise InferenceError(
            f"cannot accept the model on {accelerator}: {excess}",
            "cut the model before those operators, or allow them with --require max_cpu_ops=N or max_partitions=N",
        )


def _show_uncut(compiled: Compiled | None, say: Say) -> None:
    if compiled is not None:
        say(f"  not cut, it would be {compiled.placement.counts()}: {compiled.placement.summary()}")


def _placement(job: Job, accelerator: str, file: _File, folder: Path) -> Placement | None:
    if file.compiled is not None:
        return file.compiled.placement
    delegate = find_delegate(accelerator, job.delegate)
    return None if delegate is None else place(folder / file.name, delegate)

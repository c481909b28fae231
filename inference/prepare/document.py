"""Fills model.json: what was made, of what, by which tools, and what it must achieve."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from inference.errors import InferenceError
from inference.model_schema import NAME_LENGTH, VERSION_LENGTH, VERSION_PATTERN
from inference.prepare.recipe import CPU, FRAME_RATE_FPS, RECIPES

TOOLS = ("avocado-agent", "ai-edge-litert", "flatbuffers", "numpy")
_NUMBERS = ("latency_p95_ms", "frame_rate_fps")
PLACEMENT = ("max_cpu_ops", "max_partitions")
_ACCURACY = ("max_distance_mean", "max_score_error_mean", "min_top1_agreement", "min_similarity")
REQUIREMENTS = ("backend", *_NUMBERS, *PLACEMENT, *_ACCURACY)


def parse_requirement(text: str) -> tuple[str, float | str]:
    """`KEY=VALUE` of --require; InferenceError for an unknown key or a value that cannot be one."""
    key, _, value = text.partition("=")
    if key not in REQUIREMENTS:
        raise InferenceError(f"cannot require {key!r}: it is not known", f"known: {', '.join(REQUIREMENTS)}")
    if key == "backend":
        if value not in ("npu", "any"):
            raise InferenceError(f"cannot require backend {value!r}", "say npu or any")
        return key, value
    try:
        number = float(value)
    except ValueError as error:
        raise InferenceError(f"cannot require {key}={value}: it is not a number") from error
    if not math.isfinite(number):
        raise InferenceError(f"cannot require {key}={value}: it is not a finite number")
    if key in PLACEMENT:
        if number < 0 or not number.is_integer():
            raise InferenceError(f"cannot require {key}={value}: it is not a whole number from 0")
        return key, int(number)
    if key in _NUMBERS and number <= 0:
        raise InferenceError(f"cannot require {key}={value}: it is not above 0")
    return key, number


def check_version(version: str) -> None:
    """InferenceError for a version that no model.json may have."""
    if version and not (len(version) <= VERSION_LENGTH and re.fullmatch(VERSION_PATTERN, version)):
        raise InferenceError(
            f"cannot give a model the version {version!r}",
            f"use up to {VERSION_LENGTH} letters, digits and . _ + -, beginning with a letter or a digit",
        )


def slug(text: str) -> str:
    """A model's name, made of the name of its file."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:NAME_LENGTH].rstrip("-") or "model"


def refuse_unjudged(task: str, limits: Mapping[str, float], asked: Mapping[str, float | str]) -> None:
    """A requirement on the accuracy that this kind of model is not judged by would be forgotten."""
    for key in asked:
        if key in _ACCURACY and key not in limits:
            raise InferenceError(
                f"cannot require {key}: a model of the task {task} is not judged by it",
                f"it is judged by {', '.join(limits)}",
            )


def requirements_for(
    targets: Sequence[str], limits: Mapping[str, float], asked: Mapping[str, float | str]
) -> dict[str, Any]:
    """What every board must achieve, and under `accelerators` what only some must; `asked` replaces defaults."""
    npus = [name for name in targets if name != CPU]
    own: dict[str, dict[str, float]] = {}
    for name in npus:
        recipe = RECIPES[name]
        own[name] = {"latency_p95_ms": recipe.latency_p95_ms, **recipe.limits}
        own[name] |= {key: asked[key] for key in ("latency_p95_ms", *PLACEMENT) if key in asked}  # type: ignore[misc]
    latencies = [RECIPES[name].latency_p95_ms for name in npus or [CPU]]
    return {
        "backend": asked.get("backend", "npu" if npus else "any"),
        # The loosest of them; each accelerator's own is below.
        "latency_p95_ms": asked.get("latency_p95_ms", max(latencies)),
        "frame_rate_fps": asked.get("frame_rate_fps", FRAME_RATE_FPS),
        "accuracy": {key: asked.get(key, value) for key, value in limits.items()},
        "accelerators": own,
    }


def toolchain(tool: str = "", version: str = "") -> dict[str, str]:
    """The versions of what made a file."""
    return {**{name: metadata.version(name) for name in TOOLS}, **({tool: version} if tool else {})}


def sha256(path: Path) -> str:
    """Hex digest of one file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest_of(paths: Sequence[Path]) -> str:
    """One digest of several files, their names included."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def refuse_overlap(calibration: Sequence[Path], held_out: Sequence[Path]) -> None:
    """A picture that was calibrated on cannot judge."""
    seen = {sha256(path): path for path in calibration}
    for path in held_out:
        if (same := seen.get(sha256(path))) is not None:
            raise InferenceError(
                f"cannot judge with {path}: it is the calibration picture {same}",
                "put it into one of the two folders only",
            )

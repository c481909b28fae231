"""What each accelerator is given and which ranges a model family needs, as data.

A recipe names how a file is made. A target without one is refused by name: better no file than one that the board's
NPU runs wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inference.errors import InferenceError
from inference.prepare.bias import correct_biases
from inference.prepare.calibrate import Pictures, Range, extremes, percentiles
from inference.prepare.equalise import activity, equalise
from inference.prepare.graph import Kind, Net
from inference.prepare.quantize import round_all, write_int8
from inference.prepare.rounding import round_together, second_moments


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one accelerator's file is made, and what a board with it must achieve.

    `careful` adds what one scale a tensor cannot do without and one a channel gains a little from: equalised layers,
    weights rounded together, corrected biases. It takes a minute more. `vela` is the configuration to compile for.
    """

    name: str
    per_channel: bool
    careful: bool
    requirements: Mapping[str, Any]
    vela: str = ""


CPU = "cpu"
_ON_NPU = {"backend": "npu", "latency_p95_ms": 33.0, "frame_rate_fps": 30.0}
RECIPES = {
    CPU: Recipe("cpu-xnnpack", True, False, {"backend": "any", "latency_p95_ms": 100.0, "frame_rate_fps": 30.0}),
    "virtual": Recipe("virtual", True, False, {"backend": "npu", "latency_p95_ms": 100.0, "frame_rate_fps": 30.0}),
    # With one scale a channel this NPU is slow where it is right.
    "imx8mp-vx": Recipe("imx8mp-vx", False, True, _ON_NPU),
    "imx93-ethosu": Recipe("imx93-ethosu", True, False, _ON_NPU, vela="ethos-u65-256"),
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to choose ranges; two of them make two honest versions of a model, alike in nearly every byte."""

    version: str
    head_percentile: float
    summary: str


VARIANTS = {
    "percentile": Variant("4.1", 99.9, "percentile 99.9 where backgrounds reach far: the better one"),
    "minmax": Variant("4.0", 100.0, "the extremes of the calibration pictures everywhere"),
}

# Below -6 a score is 0 in int8 anyway; a point is never further than its whole map from the centre, nor more than a
# few cells from its peak.
_LEAST_LOGIT = -6.0
_LIMITS = {"regress": 48.0, "offset": 4.0}
_BACKBONE = "model/"


def recipe_for(target: str) -> Recipe:
    """The recipe of an accelerator."""
    if target not in RECIPES:
        raise InferenceError(
            f"cannot prepare for {target}: there are recipes for {', '.join(sorted(RECIPES))}",
            "name one of them with --target",
        )
    return RECIPES[target]


def quantize(net: Net, pictures: Pictures, recipe: Recipe, variant: Variant) -> bytes:
    """The network's INT8 file by a recipe."""
    if not recipe.careful:
        ranges = movenet_ranges(net, pictures, variant)
        return write_int8(net, ranges, codes=round_all(net, per_channel=recipe.per_channel))
    if not recipe.per_channel:
        net = equalise(net, activity(net, pictures))
    ranges = movenet_ranges(net, pictures, variant)
    codes = round_together(net, second_moments(net, pictures), per_channel=recipe.per_channel)
    return write_int8(net, ranges, codes=codes, biases=correct_biases(net, pictures, ranges, codes))


def movenet_ranges(net: Net, pictures: Pictures, variant: Variant) -> dict[str, Range]:
    """Extremes in the backbone; the variant's percentile in pyramid and heads, whose extremes are background."""
    found = extremes(net, pictures)
    ranges = dict(found)
    if variant.head_percentile < 100:
        late = [name for name in net.tensors if not name.startswith(_BACKBONE)]
        ranges.update(percentiles(net, pictures, found, late, variant.head_percentile))
    for layer in net.layers:
        if layer.kind is Kind.SIGMOID:
            logits = layer.inputs[0]
            # A rare confident point is what a percentile cuts off, and it is what the score is about.
            ranges[logits] = Range(max(found[logits].low, _LEAST_LOGIT), found[logits].high)
    for head, limit in _LIMITS.items():
        tensor = net.outputs[head]
        ranges[tensor] = Range(max(found[tensor].low, -limit), min(found[tensor].high, limit))
    return ranges

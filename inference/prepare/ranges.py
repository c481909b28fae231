"""Which range each tensor is given, as far as that differs between kinds of models."""

from __future__ import annotations

from dataclasses import dataclass

from inference.prepare.calibrate import Pictures, Range, extremes, percentiles
from inference.prepare.graph import Kind, Net


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


def choose_ranges(net: Net, pictures: Pictures, variant: Variant) -> dict[str, Range]:
    """Extremes, with what is known of MoveNet's heads where a network has them."""
    found = extremes(net, pictures)
    if not set(_LIMITS) <= set(net.outputs):
        return found
    return _pose_ranges(net, pictures, variant, found)


def _pose_ranges(net: Net, pictures: Pictures, variant: Variant, found: dict[str, Range]) -> dict[str, Range]:
    """Extremes in the backbone; the variant's percentile in pyramid and heads, whose extremes are background."""
    ranges = dict(found)
    if variant.head_percentile < 100:
        ranges.update(percentiles(net, pictures, found, _late(net), variant.head_percentile))
    for layer in net.layers:
        if layer.kind is Kind.SIGMOID:
            logits = layer.inputs[0]
            # A rare confident point is what a percentile cuts off, and it is what the score is about.
            ranges[logits] = Range(max(found[logits].low, _LEAST_LOGIT), found[logits].high)
    for head, limit in _LIMITS.items():
        tensor = net.outputs[head]
        ranges[tensor] = Range(max(found[tensor].low, -limit), min(found[tensor].high, limit))
    return ranges


def _late(net: Net) -> list[str]:
    """The pyramid behind the backbone: what follows a RESIZE, and what goes straight into one or is added to one."""
    late: set[str] = set()
    for layer in net.layers:
        if layer.kind is Kind.RESIZE or late.intersection(layer.inputs):
            late.add(layer.out)
    for layer in net.layers:
        if layer.kind is Kind.RESIZE or (layer.kind is Kind.ADD and layer.out in late):
            late.update(layer.inputs)
    return [name for name in net.tensors if name in late]

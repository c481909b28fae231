"""A small network that has every operator `prepare` writes, and pictures for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from inference.prepare.calibrate import extremes
from inference.prepare.graph import Activation, Kind, Layer, Net, Padding
from inference.prepare.quantize import round_all, write_int8

SIDE = 24


def small_net(seed: int = 7) -> Net:
    """Both paddings, both strides and all three activations."""
    draw = np.random.default_rng(seed)

    def conv(out: str, source: str, channels: tuple[int, int], kernel: int, spread: float = 0.3, **options) -> Layer:
        weights = draw.normal(0, spread, (channels[1], kernel, kernel, channels[0])).astype(np.float32)
        bias = draw.normal(0, 0.2, channels[1]).astype(np.float32)
        return Layer(Kind.CONV, out, (source,), weights, bias, **options)

    def depthwise(out: str, source: str, channels: int, **options) -> Layer:
        weights = draw.normal(0, 0.4, (1, 3, 3, channels)).astype(np.float32)
        bias = draw.normal(0, 0.2, channels).astype(np.float32)
        return Layer(Kind.DEPTHWISE, out, (source,), weights, bias, **options)

    layers = (
        Layer(Kind.SUBTRACT, "centred", ("image",), subtrahend=127.4),
        conv("stem", "centred", (3, 8), 3, 0.8 / 128, stride=2, activation=Activation.RELU6),
        depthwise("wide", "stem", 8, activation=Activation.RELU),
        conv("mixed", "wide", (8, 8), 1),
        Layer(Kind.ADD, "sum", ("stem", "mixed")),
        depthwise("half", "sum", 8, stride=2),
        conv("valid", "half", (8, 6), 3, padding=Padding.VALID),
        Layer(Kind.RESIZE, "large", ("valid",), size=(11, 9)),
        conv("points", "large", (6, 5), 1),
        Layer(Kind.SIGMOID, "scores", ("points",)),
    )
    return Net(layers, "image", {"scores": "scores", "features": "valid"}, (1, SIDE, SIDE, 3))


def detector(second_class: float) -> Net:
    """Boxes around fixed places in pixels; the scores' second channel spans `second_class` of the first's range."""
    draw = np.random.default_rng(3)

    def conv(out: str, source: str, channels: tuple[int, int], bias: np.ndarray, spread: float) -> Layer:
        weights = draw.normal(0, spread, (channels[1], 1, 1, channels[0])).astype(np.float32)
        return Layer(Kind.CONV, out, (source,), weights, bias.astype(np.float32))

    stem = draw.normal(0, 0.8 / 128, (8, 3, 3, 3)).astype(np.float32)
    scores = conv("scores", "stem", (8, 2), np.zeros(2), 1.0)
    layers = (
        Layer(Kind.SUBTRACT, "centred", ("image",), subtrahend=127.4),
        Layer(Kind.CONV, "stem", ("centred",), stem, np.zeros(8, np.float32), stride=4, activation=Activation.RELU6),
        conv("boxes", "stem", (8, 4), np.array([200.0, 150.0, 400.0, 350.0]), 20.0),
        replace(scores, weights=scores.kernel * np.array([1, second_class], np.float32)[:, None, None, None]),
    )
    return Net(layers, "image", {"boxes": "boxes", "scores": "scores"}, (1, SIDE, SIDE, 3))


def pictures(count: int = 6) -> list[np.ndarray]:
    """Noise, always the same."""
    draw = np.random.default_rng(11)
    return [draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for _ in range(count)]


def small_model(*, per_channel: bool = True, seed: int = 7) -> bytes:
    """The small network in int8."""
    net = small_net(seed)
    return write_int8(net, extremes(net, pictures), codes=round_all(net, per_channel=per_channel))

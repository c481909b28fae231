"""Reads MoveNet's TensorFlow.js graph and cuts it at its four heads.

The graph's own decode (argmax, gather, square root) stays outside, in `inference.pose`: no NPU takes it whole. The
normalisation x / 127.5 - 1 becomes one subtraction, which costs nothing in int8 because the input's zero point absorbs
it, and the division moves into the first convolution's weights. Anything the graph holds beyond what MoveNet is known
to need is refused by name. The weights are float16 in the file.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from inference.errors import InferenceError
from inference.prepare.graph import Activation, Array, Kind, Layer, Net, Padding

_PREFIX = "StatefulPartitionedCall/"
_HEADS = {
    "center": "Sigmoid_1",
    "regress": "kpt_regress_0/conv2d_6/BiasAdd",
    "heatmap": "Sigmoid",
    "offset": "kpt_offset_0/conv2d_7/BiasAdd",
}
_CENTRE_WEIGHT = "ConstantFolding/StatefulPartitionedCall/truediv_2_recip"
_NORMALISED = _PREFIX + "sub_1"
_CONVOLUTIONS = {
    "_FusedConv2D": Kind.CONV,
    "FusedDepthwiseConv2dNative": Kind.DEPTHWISE,
    "DepthwiseConv2dNative": Kind.DEPTHWISE,
}
_DECODES_WITH = frozenset(
    (
        *("AddV2", "Sub", "Mul", "RealDiv", "FloorDiv", "SquaredDifference", "Sqrt", "Cast", "ArgMax", "GatherNd"),
        *("Reshape", "ExpandDims", "Pack", "Unpack", "ConcatV2"),
    )
)
_ACTIVATIONS = {"Relu": Activation.RELU, "Relu6": Activation.RELU6}
_STORED = {np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.int32)}
_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Step:
    """One operator of the graph's own decode. `outs` are several for an Unpack."""

    operator: str
    outs: tuple[str, ...]
    inputs: tuple[str, ...]
    axis: int = 0

    @property
    def out(self) -> str:
        """The first output."""
        return self.outs[0]


@dataclass(frozen=True, slots=True)
class Decode:
    """What the graph does behind its heads, in running order; `heads` are their names there."""

    steps: tuple[Step, ...]
    heads: Mapping[str, str]
    constants: Mapping[str, Array]
    output: str


@dataclass(frozen=True, slots=True)
class MoveNet:
    """The float network down to its heads, the constant map that its decode needs, and the decode in the graph."""

    net: Net
    centre_weight: Array
    decode: Decode


def read_movenet(path: Path) -> MoveNet:
    """Read movenet-*.json and the .bin beside it."""
    try:
        document = json.loads(path.read_bytes())
        nodes = {node["name"]: node for node in document["modelTopology"]["node"]}
        weights = _read_weights(document["weightsManifest"], path.parent)
        side = int(next(iter(document["signature"]["inputs"].values()))["tensorShape"]["dim"][1]["size"])
        return _Reader(nodes, weights).movenet(side)
    except OSError as error:
        raise InferenceError(
            f"cannot read model {path}: {error.strerror}", "run `avocado-infer fetch` first"
        ) from error
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise InferenceError(
            f"cannot read model {path}: it is not the TensorFlow.js graph of a single-pose MoveNet ({error})"
        ) from error


def _read_weights(manifest: list[Mapping[str, Any]], folder: Path) -> dict[str, Array]:
    weights: dict[str, Array] = {}
    for group in manifest:
        parts = [folder / Path(name).name for name in group["paths"]]
        if sum(part.stat().st_size for part in parts) > _LIMIT_BYTES:
            raise ValueError(f"its weights are larger than {_LIMIT_BYTES} bytes")
        data = b"".join(part.read_bytes() for part in parts)
        at = 0
        for entry in group["weights"]:
            count = int(np.prod(entry["shape"], dtype=np.int64))
            stored = np.dtype(entry.get("quantization", {}).get("dtype") or entry["dtype"])
            if stored not in _STORED:
                raise ValueError(f"weight {entry['name']} is stored as {stored}")
            array = np.frombuffer(data, stored, count, at).reshape(entry["shape"])
            weights[entry["name"]] = array.astype(entry["dtype"])
            at += count * stored.itemsize
        if at != len(data):
            raise ValueError(f"its weights have {len(data)} bytes, its manifest says {at}")
    return weights


class _Reader:
    """Walks back from the heads, so that only what they need is read."""

    def __init__(self, nodes: Mapping[str, Mapping[str, Any]], weights: Mapping[str, Array]) -> None:
        self._nodes = nodes
        self._weights = weights
        self._layers: list[Layer] = []
        self._named: dict[str, str] = {}

    def movenet(self, side: int) -> MoveNet:
        self._step = self._normalisation()
        self._layers.append(Layer(Kind.SUBTRACT, "centred", ("image",), subtrahend=1 / self._step))
        self._named[_NORMALISED] = "centred"
        outputs = {head: self._visit(_PREFIX + node) for head, node in _HEADS.items()}
        net = Net(tuple(self._layers), "image", outputs, (1, side, side, 3))
        weight = self._weights[_CENTRE_WEIGHT].reshape(side // 4, side // 4).astype(np.float32)
        return MoveNet(net, weight, self._decode())

    def _decode(self) -> Decode:
        """From the output back to the heads."""
        heads = {head: _PREFIX + node for head, node in _HEADS.items()}
        done: dict[str, Step] = {}
        constants: dict[str, Array] = {}

        def visit(source: str) -> None:
            name = source.partition(":")[0]
            if name in done or name in constants or name in heads.values():
                return
            if name in self._weights:
                constants[name] = self._weights[name]
                return
            node = self._nodes[name]
            for before in node["input"]:
                visit(before)
            for step in _steps(node):
                done[step.out] = step

        (output,) = self._nodes["Identity"]["input"]
        visit(output)
        return Decode(tuple(done.values()), heads, constants, output)

    def _normalisation(self) -> float:
        """1 / 127.5, as float16 rounded it."""
        step = self._weights[_PREFIX + "truediv"]
        one = self._weights[_PREFIX + "sub_1/y"]
        if self._weights[_PREFIX + "Reshape"].any() or np.ptp(step) != 0 or one != 1:
            raise ValueError("it normalises its input in another way")
        return float(step.ravel()[0])

    def _visit(self, name: str) -> str:
        if name in self._named:
            return self._named[name]
        node = self._nodes[name]
        inputs = tuple(self._visit(source) for source in node["input"] if self._nodes[source]["op"] != "Const")
        constants = [self._weights[source] for source in node["input"] if source in self._weights]
        layer = self._layer(node, inputs, constants)
        self._layers.append(layer)
        self._named[name] = layer.out
        return layer.out

    def _layer(self, node: Mapping[str, Any], inputs: tuple[str, ...], constants: list[Array]) -> Layer:
        operator, attributes, out = node["op"], node.get("attr", {}), _short(node["name"])
        if operator in _CONVOLUTIONS:
            return self._convolution(_CONVOLUTIONS[operator], out, inputs, constants, attributes)
        if operator == "AddV2":
            return Layer(Kind.ADD, out, inputs)
        if operator == "Sigmoid":
            return Layer(Kind.SIGMOID, out, inputs)
        if operator == "ResizeBilinear":
            if not attributes["half_pixel_centers"]["b"] or attributes["align_corners"]["b"]:
                raise ValueError(f"{out} resizes in another way")
            height, width = (int(side) for side in constants[0])
            return Layer(Kind.RESIZE, out, inputs, size=(height, width))
        raise ValueError(f"operator {operator} of {out} is not supported")

    def _convolution(
        self, kind: Kind, out: str, inputs: tuple[str, ...], constants: list[Array], attributes: Mapping[str, Any]
    ) -> Layer:
        weights = constants[0].astype(np.float32).transpose(3, 0, 1, 2)  # HWIO -> OHWI, and HWC1 -> 1HWC
        channels = weights.shape[0 if kind is Kind.CONV else 3]
        fused = [_text(item) for item in attributes.get("fused_ops", {}).get("list", {}).get("s", [])]
        has_bias = "BiasAdd" in fused
        if inputs == ("centred",):
            weights = weights * np.float32(self._step)
        return Layer(
            kind,
            out,
            inputs,
            np.ascontiguousarray(weights),
            constants[1].astype(np.float32) if has_bias else np.zeros(channels, np.float32),
            stride=int(attributes["strides"]["list"]["i"][1]),
            padding=Padding(_text(attributes["padding"]["s"]).lower()),
            activation=_ACTIVATIONS.get(fused[-1], Activation.NONE) if fused else Activation.NONE,
        )


def _steps(node: Mapping[str, Any]) -> list[Step]:
    name, inputs, attributes = node["name"], tuple(node["input"]), node.get("attr", {})
    if node["op"] not in _DECODES_WITH:
        raise ValueError(f"operator {node['op']} of {_short(name)} is not supported")
    if node["op"] == "SquaredDifference":
        # One operator only since the graph was optimised; converters know it as these two.
        return [Step("Sub", (f"{name}/difference",), inputs), Step("Mul", (name,), (f"{name}/difference",) * 2)]
    outs = (name, *(f"{name}:{index}" for index in range(1, int(attributes.get("num", {}).get("i", 1)))))
    return [Step(node["op"], outs, inputs, int(attributes.get("axis", {}).get("i", 0)))]


def _text(encoded: str) -> str:
    return base64.b64decode(encoded).decode()


def _short(name: str) -> str:
    return name.replace(_PREFIX, "").replace("center_net_mobile_net_v2fpn_feature_extractor/model_1/", "")

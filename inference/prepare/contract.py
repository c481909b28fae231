"""What a model's outputs mean: how its answer is read, compared, kept as golden, and described in model.json.

A file whose outputs carry the names of MoveNet's four heads is a pose model; one row of scores is a classification;
anything else is kept as it is, bound by name, for the program that knows what it means. Outputs are never bound by
position, and heads whose names were swapped are found out by what a pose looks like.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from inference.errors import InferenceError
from inference.pose import decode_heads
from inference.prepare.channels import compare_channels, constant_float
from inference.prepare.evaluate import Agreement, compare_poses, compare_scores
from inference.prepare.graph import Array, Net

HEADS = ("center", "regress", "heatmap", "offset")
_HEAD_CHANNELS = {"center": 1, "regress": 34, "heatmap": 17, "offset": 34}
CENTRE_WEIGHT = "centre_weight.npy"
# The same kernels give the same pose; another CPU's kernels, or an NPU's rounding, move a point by a few pixels.
OKS_MIN = 0.85
_TOP = 5
# MoveNet's own constant: a person 1.8 cells from the middle counts half.
_CENTRE_CELLS = 1.8


class Contract(Protocol):
    """One kind of answer: an array, or arrays by the name of the output."""

    @property
    def task(self) -> str:
        """The `task` of model.json."""

    @property
    def names(self) -> tuple[str, ...]:
        """Signature names of the outputs."""

    @property
    def limits(self) -> Mapping[str, float]:
        """How far from float it may be, unless the user says otherwise."""

    def answer(self, outputs: Mapping[str, Array]) -> Any:
        """The answer in what the model gave for one picture."""

    def compare(self, pairs: Iterable[tuple[Any, Any]]) -> Agreement:
        """Compare answers, ours and the float model's, to the same pictures."""

    def clarity(self, answer: Any) -> float:
        """How good a golden frame its picture makes."""

    def check_float(self, net: Net, outputs: Iterable[Mapping[str, Array]]) -> None:
        """Refuse outputs that cannot be what their names say, from what the float model gave; takes all of them."""

    def output(self) -> dict[str, Any]:
        """The `output` of model.json."""

    def golden(self, answers: Mapping[str, Any]) -> dict[str, Any]:
        """What `golden` in model.json holds beside its frame, by accelerator."""

    def arrays(self) -> dict[str, Array]:
        """Constants that the answer needs, by file name."""


@dataclass(frozen=True, slots=True, eq=False)
class PoseContract:
    """MoveNet's heads, decoded by `inference.pose`."""

    centre_weight: Array
    task: str = "pose"
    names: tuple[str, ...] = HEADS

    @property
    def limits(self) -> Mapping[str, float]:
        """Twice what a good int8 model shows, a tenth of what a collapsed one does."""
        return {"max_distance_mean": 0.03, "max_score_error_mean": 0.2}

    def answer(self, outputs: Mapping[str, Array]) -> Array:
        """See `Contract`."""
        center, regress, heatmap, offset = (outputs[name] for name in HEADS)
        return decode_heads(center, regress, heatmap, offset, self.centre_weight)

    def compare(self, pairs: Iterable[tuple[Array, Array]]) -> Agreement:
        """See `Contract`."""
        return compare_poses(*zip(*pairs, strict=True))

    def clarity(self, answer: Array) -> float:
        """How well all of the person is seen."""
        return float(answer[:, 2].min() + answer[:, 2].mean())

    def check_float(self, net: Net, outputs: Iterable[Mapping[str, Array]]) -> None:
        """Heads of another size, or the two of the same size in each other's place."""
        for name, channels in _HEAD_CHANNELS.items():
            found = net.shapes[net.outputs[name]][-1]
            if found != channels:
                rightful = [other for other, count in _HEAD_CHANNELS.items() if count == found and other != name]
                hint = f", as '{rightful[0]}' should: two outputs are swapped" if rightful else ""
                raise InferenceError(
                    f"cannot use the model's outputs: '{name}' has {found} channels instead of {channels}{hint}",
                    "give each output of the signature its own name and convert it again",
                )
        reach = np.mean([_reach(heads) for heads in outputs], axis=0)
        # From a person's centre to a joint it is many cells; from a joint's cell to the joint it is less than two.
        if reach[1] > reach[0]:
            raise InferenceError(
                f"cannot use the model's outputs: 'regress' and 'offset' are swapped (they reach {reach[0]:.1f} and "
                f"{reach[1]:.1f} cells)",
                "give each output of the signature its own name and convert it again",
            )

    def output(self) -> dict[str, Any]:
        """See `Contract`."""
        return {"kind": "movenet-heads", "names": {name: name for name in HEADS}, "centre_weight": CENTRE_WEIGHT}

    def golden(self, answers: Mapping[str, Array]) -> dict[str, Any]:
        """Poses, and how near is near enough."""
        poses = {name: [[round(float(value), 5) for value in row] for row in pose] for name, pose in answers.items()}
        return {"poses": poses, "oks_min": dict.fromkeys(answers, OKS_MIN)}

    def arrays(self) -> dict[str, Array]:
        """See `Contract`."""
        return {CENTRE_WEIGHT: self.centre_weight}


@dataclass(frozen=True, slots=True, eq=False)
class ScoresContract:
    """One row of class scores."""

    name: str
    task: str = "classification"

    @property
    def names(self) -> tuple[str, ...]:
        """See `Contract`."""
        return (self.name,)

    @property
    def limits(self) -> Mapping[str, float]:
        """What separates an honest int8 model from a broken one, with room for pictures between two classes."""
        return {"min_top1_agreement": 0.85}

    def answer(self, outputs: Mapping[str, Array]) -> Array:
        """See `Contract`."""
        return np.asarray(outputs[self.name]).ravel()

    def compare(self, pairs: Iterable[tuple[Array, Array]]) -> Agreement:
        """See `Contract`."""
        return compare_scores(*zip(*pairs, strict=True))

    def clarity(self, answer: Array) -> float:
        """How far its class stands out."""
        return float(np.ptp(np.sort(answer)[-2:]))

    def check_float(self, net: Net, outputs: Iterable[Mapping[str, Array]]) -> None:
        """One that always says the same cannot be judged."""
        count, differs = _differing(outputs)
        if count > 1 and not differs:
            raise constant_float()

    def output(self) -> dict[str, Any]:
        """See `Contract`."""
        return {"kind": "scores", "names": {"scores": self.name}}

    def golden(self, answers: Mapping[str, Array]) -> dict[str, Any]:
        """The first classes and their scores."""
        return {"answers": {name: _first(scores) for name, scores in answers.items()}}

    def arrays(self) -> dict[str, Array]:
        """See `Contract`."""
        return {}


@dataclass(frozen=True, slots=True, eq=False)
class TensorsContract:
    """Outputs this project gives no meaning to."""

    names: tuple[str, ...]
    task: str = "tensors"

    @property
    def limits(self) -> Mapping[str, float]:
        """Of the worst channel of all."""
        return {"min_similarity": 0.95}

    def answer(self, outputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """The outputs as they are."""
        return {name: np.asarray(outputs[name], np.float32) for name in self.names}

    def compare(self, pairs: Iterable[tuple[Mapping[str, Array], Mapping[str, Array]]]) -> Agreement:
        """See `Contract`."""
        return compare_channels(pairs)

    def clarity(self, answer: Mapping[str, Array]) -> float:
        """How much it says."""
        return float(np.linalg.norm(_flattened(answer)))

    def check_float(self, net: Net, outputs: Iterable[Mapping[str, Array]]) -> None:
        """One that always says the same cannot be judged; nor can any by a single picture."""
        if not _differing(outputs)[1]:
            raise constant_float()

    def output(self) -> dict[str, Any]:
        """See `Contract`."""
        return {"kind": "tensors", "names": {name: name for name in self.names}}

    def golden(self, answers: Mapping[str, Mapping[str, Array]]) -> dict[str, Any]:
        """Mean and spread of all values."""
        flat = {name: _flattened(answer) for name, answer in answers.items()}
        return {"answers": {name: [[float(a.mean()), float(a.std())]] for name, a in flat.items()}}

    def arrays(self) -> dict[str, Array]:
        """See `Contract`."""
        return {}


def contract_for(net: Net, centre_weight: Array | None) -> Contract:
    """The contract of a network, from the names and shapes of its outputs."""
    if set(net.outputs) == set(HEADS):
        side = net.input_shape[1] // 4
        return PoseContract(centre_weights(side) if centre_weight is None else centre_weight)
    shapes = [net.shapes[tensor] for tensor in net.outputs.values()]
    if len(shapes) == 1 and int(np.prod(shapes[0])) == shapes[0][-1] > 1:
        return ScoresContract(next(iter(net.outputs)))
    return TensorsContract(tuple(net.outputs))


def centre_weights(side: int) -> Array:
    """The map that makes MoveNet prefer the person in the middle, for a graph that was cut before it."""
    rows, columns = np.mgrid[:side, :side] - side // 2
    return np.asarray(1 / (np.hypot(rows, columns) + _CENTRE_CELLS), np.float32)


def _flattened(answer: Mapping[str, Array]) -> Array:
    return np.concatenate([values.ravel() for values in answer.values()])


def _differing(outputs: Iterable[Mapping[str, Array]]) -> tuple[int, bool]:
    """How many there are, and whether they differ."""
    first: Mapping[str, Array] = {}
    differs = False
    count = 0
    for one in outputs:
        first = first or one
        differs = differs or any(not np.array_equal(one[name], first[name]) for name in one)
        count += 1
    return count, differs


def _first(scores: Array) -> list[list[float]]:
    order = np.argsort(-scores, kind="stable")[:_TOP]
    return [[int(index), round(float(scores[index]), 5)] for index in order]


def _reach(heads: Mapping[str, Array]) -> tuple[float, float]:
    """How far regress reaches at the best centre, and offset at the best cell of each joint, in cells."""
    centre = heads["center"].reshape(-1)
    regress = heads["regress"].reshape(len(centre), 34)[int(centre.argmax())]
    joints = heads["heatmap"].reshape(-1, 17)
    offsets = heads["offset"].reshape(len(centre), 17, 2)
    at_joints = [np.abs(offsets[int(joints[:, joint].argmax()), joint]).mean() for joint in range(17)]
    return float(np.abs(regress).mean()), float(np.mean(at_joints))

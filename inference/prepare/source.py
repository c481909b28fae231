"""Opens whatever MODEL names: MoveNet's TensorFlow.js graph, or any float .tflite; and checks that it was read right.

The network read from a .tflite is written again in float and compared with the original file, so that a reader's
mistake is found before anything is quantized.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from inference.errors import InferenceError
from inference.prepare.contract import Contract, contract_for
from inference.prepare.graph import Array, Net
from inference.prepare.run import Original, Runner
from inference.prepare.tfjs import Decode, read_movenet
from inference.prepare.tflite import TfLite, read_file, read_tflite
from inference.prepare.writer import write_float

_TOLERANCE = 1e-3
_COMPARED = 4


@dataclass(frozen=True, slots=True)
class Source:
    """A float network, what its outputs mean, the file it came from where that can be run, and what was cut off."""

    net: Net
    contract: Contract
    original: TfLite | None = None
    decode: Decode | None = None

    @property
    def side(self) -> int:
        """Side of the square input."""
        return self.net.input_shape[1]


def read_source(path: Path, *, input_range: tuple[float, float] | None = None, dequantize: bool = False) -> Source:
    """Read MODEL; InferenceError says what is wrong with it."""
    if path.suffix == ".json":
        movenet = read_movenet(path)
        contract = contract_for(movenet.net, movenet.centre_weight)
        return Source(movenet.net, contract, decode=movenet.decode)
    if path.suffix in (".h5", ".keras", ".pb", ".onnx", ".pt", ".pth"):
        raise InferenceError(
            f"cannot read model {path}: {path.suffix} files are not read here",
            "convert it to a float32 .tflite with the tool it was trained with",
        )
    read_file(path)
    found = read_tflite(path, input_range=input_range, dequantize=dequantize)
    return Source(found.net, contract_for(found.net, None), found)


def check_source(source: Source, pictures: Iterable[Array]) -> str:
    """Compare what was read with the original file and return a line about it; empty when there is none to run."""
    found = source.original
    if found is None:
        return ""
    original = Original(found.content, tuple(found.net.outputs), found.low, found.high)
    ours = Runner(write_float(found.net))
    contract = source.contract
    if found.quantized:
        pairs = ((contract.answer(ours(picture)), contract.answer(original(picture))) for picture in pictures)
        return f"its values as float beside the quantized original: {contract.compare(pairs).summary()}"
    differences = [0.0]
    for picture in islice(pictures, _COMPARED):
        a, b = ours(picture), original(picture)
        differences += [float(np.abs(a[name] - b[name]).max() / max(np.abs(b[name]).max(), 1e-9)) for name in a]
    # Not max(), which prefers 0 to what is no number.
    worst = float(np.max(differences))
    if not worst <= _TOLERANCE:
        raise InferenceError(
            f"cannot accept the model: after the step 'float' an output differs by {worst:.1%} from the file's own",
            "report this model: it holds something that is read wrongly",
        )
    return f"the same as the original file to {worst:.0e}"

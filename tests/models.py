"""Model folders for tests: one whose files are only placeholders, and a real one spoiled on purpose."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np


def placeholder_model(folder: Path, *, size: int = 192, accelerators: tuple[str, ...] = ("cpu", "virtual")) -> Path:
    """A folder that the loader accepts; its .tflite is not one, so nothing can run it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.tflite").write_bytes(b"\0\0\0\0TFL3 placeholder")
    np.save(folder / "golden.npy", np.zeros((size, size, 3), np.uint8))
    np.save(folder / "centre_weight.npy", np.ones((size // 4, size // 4), np.float32))
    pose = [[0.1 + 0.04 * row, 0.5, 0.8] for row in range(17)]
    file = {
        "path": "cpu.tflite",
        "sha256": sha256(folder / "cpu.tflite"),
        "recipe": "cpu-xnnpack",
        "toolchain": {"avocado": "0.1.0"},
    }
    write(
        folder,
        {
            "schema": 1,
            "name": "placeholder",
            "version": "1",
            "task": "pose",
            "input": {"name": "image", "shape": [1, size, size, 3], "dtype": "uint8"},
            "output": {
                "kind": "movenet-heads",
                "names": {name: name for name in ("center", "regress", "heatmap", "offset")},
                "centre_weight": "centre_weight.npy",
            },
            "files": {name: dict(file) for name in accelerators},
            "digests": {name: sha256(folder / name) for name in ("golden.npy", "centre_weight.npy")},
            "golden": {
                "frame": "golden.npy",
                "poses": dict.fromkeys(accelerators, pose),
                "oks_min": dict.fromkeys(accelerators, 0.9),
            },
            "calibration": {},
            "accuracy": {},
            "placement": {},
            "requirements": {"backend": "any", "latency_p95_ms": 50.0, "frame_rate_fps": 30.0},
        },
    )
    return folder


def read(folder: Path) -> dict[str, Any]:
    """The folder's model.json."""
    document: dict[str, Any] = json.loads((folder / "model.json").read_text())
    return document


def write(folder: Path, document: dict[str, Any]) -> None:
    """Replace the folder's model.json, unchecked."""
    (folder / "model.json").write_text(json.dumps(document))


def sha256(path: Path) -> str:
    """Hex digest of one file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


PREPARED = Path(__file__).parent.parent / "build" / "models" / "movenet-lightning"
"""What `make model` leaves."""


def spoil_model(folder: Path, out: Path, *, version: str = "0-spoiled") -> Path:
    """A copy of a prepared folder whose heatmap and regression are dead, with hashes that match.

    Loads, runs at full speed and answers; only the golden frame can tell.
    """
    shutil.copytree(folder, out)
    for name in {file["path"] for file in read(out)["files"].values()}:
        content = (out / name).read_bytes()
        # A compiled file keeps its weights where nobody finds them.
        if b"ethos-u" not in content:
            (out / name).write_bytes(zero_weights(content, "kpt_heatmap_0/conv2d_5", "kpt_regress_0/conv2d_6"))
    document = read(out)
    document["version"] = version
    for file in document["files"].values():
        file["sha256"] = sha256(out / file["path"])
    write(out, document)
    return out


def zero_weights(content: bytes, *layers: str) -> bytes:
    """A .tflite in which the weights and biases of every layer of these names are zero."""
    from ai_edge_litert import schema_py_generated as schema

    spoiled = bytearray(content)
    model = schema.Model.GetRootAs(spoiled)
    graph = model.Subgraphs(0)
    zeroed = 0
    for index in range(graph.TensorsLength()):
        tensor = graph.Tensors(index)
        if not tensor.Name().decode().startswith(layers):
            continue
        # A view of `spoiled`; activations have no data.
        data = model.Buffers(tensor.Buffer()).DataAsNumpy()
        if isinstance(data, np.ndarray):
            data[:] = 0
            zeroed += 1
    if zeroed != 2 * len(layers):
        raise AssertionError(f"found {zeroed} constants of {layers}")
    return bytes(spoiled)


def shift_model(folder: Path, out: Path, *, version: str, seed: int = 1) -> Path:
    """A copy of a prepared folder in which every weight is one more or one less, as after a little more training.

    Another seed gives another model. Its golden poses are those it really gives, so it is as good a model as the first.
    """
    from inference.pose import decode_heads
    from inference.prepare.run import Runner

    shutil.copytree(folder, out)
    document = read(out)
    frame, centre_weight = np.load(out / "golden.npy"), np.load(out / document["output"]["centre_weight"])
    for name in {file["path"] for file in document["files"].values()}:
        content = shift_weights((out / name).read_bytes(), seed)
        (out / name).write_bytes(content)
        heads = Runner(content)(frame)
        pose = decode_heads(*(heads[head] for head in ("center", "regress", "heatmap", "offset")), centre_weight)
    document["golden"]["poses"] = dict.fromkeys(document["golden"]["poses"], np.round(pose, 5).tolist())
    document["version"] = version
    for file in document["files"].values():
        file["sha256"] = sha256(out / file["path"])
    write(out, document)
    return out


def shift_weights(content: bytes, seed: int) -> bytes:
    """A .tflite whose int8 constants are all one more or one less; in no pattern, and the same in every run."""
    from ai_edge_litert import schema_py_generated as schema

    shifted = bytearray(content)
    graph = schema.Model.GetRootAs(shifted).Subgraphs(0)
    buffers = schema.Model.GetRootAs(shifted).Buffers
    dice = np.random.default_rng(seed)
    for index in range(graph.TensorsLength()):
        tensor = graph.Tensors(index)
        data = buffers(tensor.Buffer()).DataAsNumpy()
        if tensor.Type() == schema.TensorType.INT8 and isinstance(data, np.ndarray):
            values = data.view(np.int8)
            away = np.where(values >= 127, -1, np.where(values <= -127, 1, dice.choice((-1, 1), values.size)))
            values += away.astype(np.int8)
    return bytes(shifted)

"""Model folders for tests: one whose files are only placeholders, and a real one spoiled on purpose."""

from __future__ import annotations

import hashlib
import json
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

"""Which inference runtime is taken: what the extension ships before what the board's BSP has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNTIME = "Interpreter = load_delegate = None\n"
ABSENT = "raise ImportError\n"


@pytest.mark.parametrize(
    ("shipped", "taken"), [(RUNTIME, "ai_edge_litert"), (ABSENT, "tflite_runtime")], ids=["both", "the board's only"]
)
def test_the_extensions_runtime_comes_before_the_boards(tmp_path: Path, shipped: str, taken: str) -> None:
    for name, text in {"ai_edge_litert": shipped, "tflite_runtime": RUNTIME}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "interpreter.py").write_text(text)
    found = subprocess.run(
        [sys.executable, "-c", "from inference import litert; print(litert.RUNTIME)"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert found.stdout == f"{taken}\n"

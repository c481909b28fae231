"""The supervised worker on `tflite_runtime`, which boards' BSPs ship: the same suite, in a venv of its own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.inference import rig

SUITE = "tests/inference/test_supervision.py"

pytestmark = pytest.mark.long


@pytest.mark.timeout(900)
def test_supervision_is_the_same_on_the_runtime_of_the_bsp(tflite_runtime: Path) -> None:
    rig.require()
    # Its wheel computes INT8 without XNNPACK, in ten times the time.
    environment = {**os.environ, "PYTHONPATH": str(rig.ROOT), "AVOCADO_TEST_SOFT_MS": "600"}
    loaded = subprocess.run(
        [tflite_runtime, "-c", "from inference import litert; print(litert.RUNTIME, litert.RUNTIME_VERSION)"],
        cwd=rig.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert loaded.stdout.split() == ["tflite_runtime", "2.14.0"]
    line = [tflite_runtime, "-m", "pytest", "-q", "-p", "no:cacheprovider", SUITE]
    done = subprocess.run(
        line, cwd=rig.ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout, done.stdout

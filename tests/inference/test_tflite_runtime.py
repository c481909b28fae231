"""The supervised worker on `tflite_runtime`, which boards' BSPs ship: the same suite, in a venv of its own."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.inference import rig

REQUIREMENTS = rig.ROOT / "requirements/tflite-runtime.txt"
SUITE = "tests/inference/test_supervision.py"

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def python() -> Path:
    """An interpreter that has `tflite_runtime` and no `ai_edge_litert`; made once for each lock file."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("tflite_runtime in the registry ends at Python 3.11; this is another")
    rig.require()
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:8]
    cache = Path(os.environ.get("AVOCADO_CACHE") or Path.home() / ".cache/avocado")
    folder = cache / f"tflite-runtime-{digest}"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        wanted = ["--quiet", "--disable-pip-version-check", "--require-hashes", "-r", str(REQUIREMENTS)]
        subprocess.run([folder / "bin/python", "-m", "pip", "install", *wanted], check=True, timeout=300)
        (folder / "complete").touch()
    return folder / "bin/python"


@pytest.mark.timeout(900)
def test_supervision_is_the_same_on_the_runtime_of_the_bsp(python: Path) -> None:
    # Its wheel computes INT8 without XNNPACK, in ten times the time.
    environment = {**os.environ, "PYTHONPATH": str(rig.ROOT), "AVOCADO_TEST_SOFT_MS": "600"}
    loaded = subprocess.run(
        [python, "-c", "from inference import litert; print(litert.RUNTIME, litert.RUNTIME_VERSION)"],
        cwd=rig.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert loaded.stdout.split() == ["tflite_runtime", "2.14.0"]
    line = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", SUITE]
    done = subprocess.run(
        line, cwd=rig.ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout, done.stdout

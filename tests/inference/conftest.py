from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.inference import rig as rigs


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> rigs.Rig:
    rigs.require()
    monkeypatch.setenv(rigs.MARK, rigs.new_mark())
    made = rigs.Rig(tmp_path)
    made.node.touch()
    made.inject("ok")
    return made


@pytest.fixture(scope="session")
def library() -> Path:
    """The simulated NPU, built anew when its source changed."""
    folder = rigs.ROOT / "build" / "simnpu"
    done = subprocess.run(
        ["make", "-C", str(rigs.ROOT / "tests" / "simnpu"), f"OUT={folder}"], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    return folder / "libsimnpu.so"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small INT8 network of every operator the simulated NPU can have to do with."""
    path = tmp_path_factory.mktemp("simnpu") / "small.tflite"
    # Imported here: the suite also runs on a runtime that cannot write models.
    from tests.networks import small_model

    path.write_bytes(small_model())
    return path


@pytest.fixture(scope="session")
def tflite_runtime() -> Path:
    """An interpreter that has `tflite_runtime` and no `ai_edge_litert`; made once for each lock file."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("tflite_runtime in the registry ends at Python 3.11; this is another")
    requirements = rigs.ROOT / "requirements/tflite-runtime.txt"
    digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:8]
    cache = Path(os.environ.get("AVOCADO_CACHE") or Path.home() / ".cache/avocado")
    folder = cache / f"tflite-runtime-{digest}"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        wanted = ["--quiet", "--disable-pip-version-check", "--require-hashes", "-r", str(requirements)]
        subprocess.run([folder / "bin/python", "-m", "pip", "install", *wanted], check=True, timeout=300)
        (folder / "complete").touch()
    return folder / "bin/python"

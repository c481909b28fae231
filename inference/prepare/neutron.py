"""Converts an INT8 file for an eIQ Neutron NPU with NXP's converter, where that is installed.

NXP ships `neutron-converter` with its eIQ Toolkit only, so it is called where it is found and named where it is not.
It must match the board's BSP; its own version goes into model.json. A converted file runs nowhere but on that NPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from inference.errors import InferenceError
from inference.prepare.vela import Compiled, placement_of

_PROGRAM = "neutron-converter"
_OPERATOR = "NeutronGraph"
_DEADLINE_S = 600
_VERSION_LIMIT = 120


def convert_for(content: bytes, target: str) -> Compiled:
    """Convert for one SoC, such as `imx95`."""
    program = find_converter()
    with tempfile.TemporaryDirectory() as scratch:
        source, result = Path(scratch) / "model.tflite", Path(scratch) / "converted.tflite"
        source.write_bytes(content)
        _run([program, "--input", str(source), "--target", target, "--output", str(result)])
        if not result.is_file():
            raise InferenceError(f"cannot convert for a Neutron NPU: {_PROGRAM} ended well and wrote nothing")
        converted = result.read_bytes()
    said = _run([program, "--version"]).strip().splitlines() or ["unknown"]
    version = " ".join(said[0].split())[:_VERSION_LIMIT]
    return Compiled(converted, placement_of(content, converted, _OPERATOR, {}), None, _PROGRAM, version)


def find_converter() -> str:
    """The program's path; InferenceError when it is not installed."""
    found = shutil.which(_PROGRAM, path=os.environ.get("PATH"))
    if found is None:
        raise InferenceError(
            f"cannot convert for a Neutron NPU: NXP's {_PROGRAM} is not installed",
            f"install the eIQ Toolkit of the board's BSP release and put its {_PROGRAM} on PATH",
        )
    return found


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise InferenceError(f"cannot convert for a Neutron NPU: {_PROGRAM} did not end in {_DEADLINE_S} s") from error
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise InferenceError(f"cannot convert for a Neutron NPU: {words[-1] if words else _PROGRAM + ' said nothing'}")
    return done.stdout

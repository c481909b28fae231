"""Compiles an INT8 file for an Ethos-U with Arm's Vela, and reads from the result what the NPU takes.

Vela is a program of its own (package ethos-u-vela), run with a deadline. What it could not place stays as ordinary
operators in the file, with a reason; what it could is one custom operator a piece. The compiled file runs nowhere but
on that NPU.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ai_edge_litert import schema_py_generated as schema

from inference.errors import InferenceError
from inference.measure.placement import Placement

VERSION = "5.2.0"
_CUSTOM = "ethos-u"
_DEADLINE_S = 300
_REFUSED = re.compile(r"^Warning \(supported operators\) operator: (\w+), ofm: .*\nReason: (.*)$", re.MULTILINE)
# Vela's own name for an operator, where it is not the schema's.
_OWN_NAMES = {"ARGMAX": "ARG_MAX"}
_NAMES = {code: name for name, code in vars(schema.BuiltinOperator).items() if not name.startswith("_")}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a compiler made, and what it expects of it."""

    content: bytes
    placement: Placement
    estimate_ms: float | None
    tool: str
    version: str


def compile_for(content: bytes, configuration: str) -> Compiled:
    """Compile for one accelerator configuration, such as `ethos-u65-256`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = folder / "model.tflite"
        source.write_bytes(content)
        vela = find_vela()
        where = ["--accelerator-config", configuration, "--output-dir", str(folder / "out")]
        said = _run([vela, *where, "--show-cpu-operations", str(source)])
        compiled = (folder / "out" / "model_vela.tflite").read_bytes()
        version = _run([vela, "--version"]).strip()
        placement = placement_of(content, compiled, _CUSTOM, _reasons(said))
        return Compiled(compiled, placement, _estimate_ms(folder / "out"), "ethos-u-vela", version)


def find_vela() -> str:
    """The program's path; InferenceError when it is not installed."""
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which("vela", path=here)
    if found is None:
        raise InferenceError(
            "cannot compile for an Ethos-U: vela is not installed", f"install it: pip install ethos-u-vela=={VERSION}"
        )
    return found


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise InferenceError(f"cannot compile for an Ethos-U: vela did not end within {_DEADLINE_S} s") from error
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise InferenceError(f"cannot compile for an Ethos-U: {words[-1] if words else 'vela failed without a word'}")
    return done.stdout


def placement_of(source: bytes, compiled: bytes, custom: str, reasons: Mapping[str, str]) -> Placement:
    """What moved into the operators of this custom name, from the two files."""
    before, after = _operators(source), _operators(compiled)
    partitions = after.pop(custom, 0)
    left = {name: reasons[name] for name in after if name in reasons}
    return Placement(accelerated=before - after, cpu=after, partitions=partitions, reasons=left)


def _reasons(said: str) -> dict[str, str]:
    """Why Vela refused an operator, by its name; its first reason where it has several."""
    reasons: dict[str, str] = {}
    for name, reason in _REFUSED.findall(said):
        reasons.setdefault(_OWN_NAMES.get(name, name), " ".join(reason.split()))
    return reasons


def _operators(content: bytes) -> Counter[str]:
    model = schema.Model.GetRootAs(content)
    graph = model.Subgraphs(0)
    names: Counter[str] = Counter()
    for index in range(graph.OperatorsLength()):
        code = model.OperatorCodes(graph.Operators(index).OpcodeIndex())
        custom = code.CustomCode()
        names[custom.decode() if custom else _NAMES[code.BuiltinCode()]] += 1
    return names


def _estimate_ms(folder: Path) -> float:
    (summary,) = folder.glob("model_summary_*.csv")
    with summary.open(newline="") as file:
        row = next(csv.DictReader(file))
    return float(row["inference_time"]) * 1000

"""Compiled bytecode for a read-only /usr, made by a CPython of the board's minor version.

The board cannot cache bytecode in a merged image, and importing from sources doubles the start of every program there.
Bytecode carries an unchecked hash instead of a time, so it depends on the sources and the compiler alone. Sources go in
and bytecode comes out through standard input and output: the compiler may be a program on PATH, or any wrapper that
reaches one (`chroot`, `ssh`, `docker run -i`) named in AVOCADO_BOARD_PYTHON. Where there is none, images carry sources
only, and the build says so.
"""

from __future__ import annotations

import io
import os
import shlex
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from shutil import which

from agent.contract.errors import ErrorCode, OperationError
from agent.ports.process import run

VARIABLE = "AVOCADO_BOARD_PYTHON"
MAX_BYTES = 256 << 20
_TIMEOUT_S = 300.0

_ASK = "import sys; print('avocado', sys.implementation.name, *sys.version_info[:3])"

# Runs in the board's Python. A file of a newer or older syntax than its own is left as a source.
_COMPILE = """
import importlib.util, io, marshal, sys, zipfile
sources, made = zipfile.ZipFile(io.BytesIO(sys.stdin.buffer.read())), io.BytesIO()
with zipfile.ZipFile(made, "w") as out:
    for name in sources.namelist():
        data = sources.read(name)
        try:
            code = compile(data, "/" + name, "exec", dont_inherit=True, optimize=0)
        except (SyntaxError, ValueError):
            continue
        head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(data)
        out.writestr(zipfile.ZipInfo(importlib.util.cache_from_source(name)), head + marshal.dumps(code))
sys.stdout.buffer.write(made.getvalue())
"""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A CPython of the board's minor version, and how to run it."""

    argv: tuple[str, ...]
    version: str  # "3.13.5"


def find_compiler(minor: str) -> Compiler | None:
    """The compiler for boards with that Python, or None.

    Raises `build-failed` when AVOCADO_BOARD_PYTHON is set and is not such a Python: that is a mistake, not an absence.
    """
    named = os.environ.get(VARIABLE, "")
    if not named:
        program = which(f"python{minor}")
        return _ask((program,), minor) if program else None
    found = _ask(tuple(shlex.split(named)), minor)
    if found is None:
        raise OperationError(
            ErrorCode.BUILD_FAILED,
            f"cannot compile for Python {minor}: {VARIABLE}={named!r} is not a CPython {minor}",
            f"Point {VARIABLE} at a CPython {minor}, or unset it to ship sources only.",
        )
    return found


def _ask(argv: tuple[str, ...], minor: str) -> Compiler | None:
    try:
        answer = run([*argv, "-I", "-c", _ASK], 60.0)
    except OperationError as error:
        if error.code is ErrorCode.TOOL_MISSING:
            return None
        raise
    words = answer.stdout.decode(errors="replace").split()
    if answer.status != 0 or words[:2] != ["avocado", "cpython"] or ".".join(words[2:4]) != minor:
        return None
    return Compiler(argv, ".".join(words[2:5]))


def compile_sources(compiler: Compiler, sources: Mapping[str, bytes]) -> dict[str, bytes]:
    """Bytecode files by path, for sources by path; both relative to the image's root. Raises `build-failed`."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as out:
        for name in sorted(sources):
            out.writestr(zipfile.ZipInfo(name), sources[name])
    answer = run(
        [*compiler.argv, "-I", "-B", "-W", "ignore", "-c", _COMPILE],
        _TIMEOUT_S,
        stdin=packed.getvalue(),
        max_output_bytes=MAX_BYTES,
    )
    try:
        if answer.status == 0:
            with zipfile.ZipFile(io.BytesIO(answer.stdout)) as made:
                return {name: made.read(name) for name in made.namelist()}
    except zipfile.BadZipFile:
        pass  # said below, with the compiler's own last words
    raise OperationError(ErrorCode.BUILD_FAILED, f"cannot compile with {' '.join(compiler.argv)}: {answer.last_words}")

"""A lock file becomes a folder of Python packages for the board: chosen, verified, trimmed, made smaller.

uv chooses wheels for the board's Python and platform, never for this machine's, takes wheels only and checks every
hash. What no program on a board reads is dropped, what may be stripped is stripped, and the result is checked to be
loadable. The folder is kept under a name made of everything that went in.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from uv import find_uv_bin

from agent.contract.errors import ErrorCode, OperationError
from agent.host.elf import check_tree, find_strip, strip_tree
from agent.host.target import Target
from agent.ports.process import run

# Raised when this module makes other bytes of the same wheels.
_RECIPE = 1
_TIMEOUT_S = 900.0

_DROPPED_FOLDERS = {"tests", "test_data", "__pycache__", "bin", "include"}
_DROPPED_SUFFIXES = {".pyi", ".pyx", ".pxd", ".pxi", ".c", ".h", ".cpp", ".pyc"}
_DROPPED_PATHS = (
    "ai_edge_litert/libLiteRtWebGpuAccelerator.so",
    "ai_edge_litert/vendors",
    "ai_edge_litert/aot",
    "ai_edge_litert/tools",
    "numpy/f2py",
    "pycparser",
)
_DROPPED_PATTERNS = ("multidict/_testcapi*", "backports/zstd/*test*")
# Of a package's metadata: what programs ask for, and what its licence wants shown. The rest names this machine.
_KEPT_METADATA = ("METADATA", "entry_points.txt", "LICEN", "COPYING", "NOTICE", "AUTHORS", "licenses")


@dataclass(frozen=True, slots=True)
class Wheels:
    """A folder of packages, ready to be copied into an image."""

    folder: Path
    key: str
    notices: tuple[str, ...]


def build_wheels(lock: Path, target: Target, cache: Path) -> Wheels:
    """The lock file's packages for the board. Raises `build-failed` with uv's own reason."""
    strip = find_strip(target.arch)
    notices = () if strip else (f"no strip program for {target.arch}: the packages of {lock.name} keep debug symbols",)
    try:
        text = lock.read_bytes()
    except OSError as cause:
        raise OperationError(ErrorCode.BAD_PROJECT, f"cannot read {lock}: {cause.strerror}") from cause
    parts = [_RECIPE, text.decode(errors="replace"), target.python, target.python_platform, strip]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    folder = cache / "wheels" / key
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = folder.with_name(f"{key}.{os.getpid()}")
        try:
            _install(lock, target, work)
            trim(work)
            if strip:
                strip_tree(work, strip)
            check_tree(work, target.arch)
            work.rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return Wheels(folder, key, notices)


def _install(lock: Path, target: Target, folder: Path) -> None:
    finished = run(
        [
            find_uv_bin(),
            "pip",
            "install",
            "--quiet",
            "--no-config",
            "--no-progress",
            "--link-mode=copy",
            *("--target", str(folder)),
            *("--python-version", target.python),
            *("--python-platform", target.python_platform),
            *("--only-binary", ":all:"),
            "--require-hashes",
            *("-r", str(lock)),
        ],
        _TIMEOUT_S,
        cwd=lock.parent,
    )
    if finished.status != 0:
        said = finished.stderr.decode(errors="replace").strip()
        raise OperationError(
            ErrorCode.BUILD_FAILED,
            f"cannot install {lock.name} for Python {target.python} on {target.arch}: {finished.last_words}",
            "Lock again with `uv pip compile --universal --generate-hashes`."
            if "hash" in said
            else "Check that every requirement has a wheel for that Python and processor.",
            {"uv": said[-2000:]},
        )


def trim(folder: Path) -> None:
    """Drop what no program on a board reads."""
    for path in sorted(folder.rglob("*"), reverse=True):
        inside = PurePosixPath(path.relative_to(folder))
        if not _is_dropped(inside, is_folder=path.is_dir() and not path.is_symlink()):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _is_dropped(inside: PurePosixPath, *, is_folder: bool) -> bool:
    text = str(inside)
    if text in _DROPPED_PATHS or any(inside.match(pattern) for pattern in _DROPPED_PATTERNS):
        return True
    if is_folder:
        return inside.name in _DROPPED_FOLDERS
    if inside.parts[0].endswith(".dist-info"):
        return not inside.parts[1].startswith(_KEPT_METADATA)
    return inside.suffix in _DROPPED_SUFFIXES or inside.name == ".lock"

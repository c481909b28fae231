"""One extension becomes one EROFS image: the same inputs give the same bytes, and are built once.

Code is compressed; a model is stored plain, so that a new one differs from the old one where its weights differ and
nowhere else, which is what keeps deltas small. Times, owners, modes and the file system's id are fixed. Finished images
lie in the project's build folder by content, beside an index by inputs; the inputs include every tool that has a say in
the bytes, and the manifest records those.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import IMAGE_NAMESPACE, Extension, image_id
from agent.host.bytecode import VARIABLE, Compiler, compile_sources, find_compiler
from agent.host.model import check_files, model_version, placement_line
from agent.host.project import ExtensionPart, Project
from agent.host.stage import CAPABILITY_XATTR, lay_out, mark_release, normalise, walk
from agent.host.wheels import Wheels, build_wheels
from agent.ports.process import run, run_checked

# Raised when this module makes other bytes of the same inputs.
_RECIPE = 3
_TIMEOUT_S = 600.0
_CLUSTER_BYTES = 65536
_PLAIN = r"\.tflite$"


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """An image, and what a person should know about how it was made."""

    extension: Extension
    path: Path
    built_with: dict[str, str]
    notices: tuple[str, ...]
    is_new: bool


@dataclass(frozen=True, slots=True)
class _Toolbox:
    """What has a say in the bytes besides the project's own files."""

    wheels: Wheels | None
    compiler: Compiler | None
    built_with: dict[str, str]
    notices: tuple[str, ...]


class _Stored(TypedDict):
    sha256: str
    size_bytes: int


def build_image(project: Project, name: str) -> BuiltImage:
    """Build one extension, or find it built. Raises `bad-project`, `build-failed` or `tool-missing`."""
    part = project.document.extensions[name]
    version = part.version
    placement = ""
    if part.model is not None:
        folder, accelerator = project.path(part.model), project.target.accelerator
        own = model_version(folder, accelerator)
        version = version or own
        check_files(folder, accelerator)
        placement = placement_line(folder, accelerator)
    tools = _toolbox(project, part)
    with _work_folder(project.build_folder) as work:
        root = work / "root"
        root.mkdir()
        lay_out(project, name, part, root)
        inputs = _digest(project, name, part, root, tools)
        found = _find(project.build_folder, inputs)
        if found is None:
            _add_python(part, root, tools)
            normalise(root, part)
            mark_release(root, name, part)
            stored = _store(project.build_folder, inputs, _make(name, root, work))
        else:
            stored = found
    extension = Extension(
        name=name,
        version=version or "",
        image_id=image_id(stored["sha256"]),
        sha256=stored["sha256"],
        size_bytes=stored["size_bytes"],
        types=list(part.types),
    )
    path = image_path(project.build_folder, extension.image_id)
    notices = (*tools.notices, *([placement] if placement else []))
    return BuiltImage(extension, path, tools.built_with, notices, is_new=found is None)


def image_path(build_folder: Path, image: str) -> Path:
    """Where a built image of that id lies, whether or not it exists."""
    return build_folder / "images" / f"{image}.raw"


def _toolbox(project: Project, part: ExtensionPart) -> _Toolbox:
    built_with = {"mkfs.erofs": erofs_version()}
    if part.python is None:
        return _Toolbox(None, None, built_with, ())
    notices: list[str] = []
    wheels = None
    if part.python.requirements is not None:
        cache = project.build_folder / "cache"
        wheels = build_wheels(project.path(part.python.requirements), project.target, cache)
        notices += wheels.notices
    minor = project.target.python
    compiler = find_compiler(minor)
    if compiler is None:
        notices.append(f"no CPython {minor} here (python{minor} on PATH, or {VARIABLE}): sources only, slower to start")
    else:
        built_with["bytecode"] = f"CPython {compiler.version}"
    return _Toolbox(wheels, compiler, built_with, tuple(notices))


def _add_python(part: ExtensionPart, root: Path, tools: _Toolbox) -> None:
    if part.python is None:
        return
    folder = root / part.python.folder
    if tools.wheels is not None:
        shutil.copytree(tools.wheels.folder, folder, symlinks=True, dirs_exist_ok=True)
    if tools.compiler is None:
        return
    sources = {str(path.relative_to(root)): path.read_bytes() for path in walk(folder) if path.suffix == ".py"}
    for inside, bytecode in compile_sources(tools.compiler, sources).items():
        path = root / inside
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytecode)


def _digest(project: Project, name: str, part: ExtensionPart, root: Path, tools: _Toolbox) -> str:
    """A name for everything that decides the image's bytes."""
    tree = [[str(path.relative_to(root)), *_content(path)] for path in walk(root)]
    document = {
        "recipe": _RECIPE,
        "name": name,
        "part": part.model_dump(mode="json", include={"types", "modes", "python"}),
        "target": asdict(project.target),
        "built_with": tools.built_with,
        "wheels": tools.wheels.key if tools.wheels else None,
        "tree": tree,
    }
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def _content(path: Path) -> list[str]:
    if path.is_symlink():
        return ["link", str(path.readlink())]
    if path.is_dir():
        return ["folder"]
    executable = "x" if path.stat().st_mode & 0o100 else "-"
    capabilities = os.getxattr(path, CAPABILITY_XATTR).hex() if CAPABILITY_XATTR in os.listxattr(path) else ""
    with path.open("rb") as file:
        return [executable, capabilities, hashlib.file_digest(file, "sha256").hexdigest()]


def _make(name: str, root: Path, work: Path) -> Path:
    hints, image = work / "hints", work / "image.raw"
    hints.write_text(f"0 {_PLAIN}\n", encoding="utf-8")
    run_checked(
        [
            "mkfs.erofs",
            "--quiet",
            # Level 12 takes three times as long and saves 0.3 %.
            "-zlz4hc,9",
            f"-C{_CLUSTER_BYTES}",
            "-T0",
            "--all-root",
            # By name, not by content: a new version of an extension must not differ where nothing changed.
            f"-U{uuid.uuid5(IMAGE_NAMESPACE, name)}",
            f"--compress-hints={hints}",
            str(image),
            str(root),
        ],
        _TIMEOUT_S,
        failure=ErrorCode.BUILD_FAILED,
    )
    return image


def _find(build_folder: Path, inputs: str) -> _Stored | None:
    try:
        stored: _Stored = json.loads((build_folder / "cache" / "images" / f"{inputs}.json").read_bytes())
        size_bytes = image_path(build_folder, image_id(stored["sha256"])).stat().st_size
    except (OSError, ValueError, KeyError):
        return None  # never built, or cleaned away: it is built again
    return stored if size_bytes == stored["size_bytes"] else None


def _store(build_folder: Path, inputs: str, image: Path) -> _Stored:
    with image.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    stored: _Stored = {"sha256": sha256, "size_bytes": image.stat().st_size}
    path = image_path(build_folder, image_id(sha256))
    index = build_folder / "cache" / "images" / f"{inputs}.json"
    for folder in (path.parent, index.parent):
        folder.mkdir(parents=True, exist_ok=True)
    image.chmod(0o644)
    image.replace(path)
    written = image.with_name("index.json")
    written.write_text(json.dumps(stored), encoding="utf-8")
    written.replace(index)
    return stored


@contextmanager
def _work_folder(build_folder: Path) -> Iterator[Path]:
    parent = build_folder / "work"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix="image-") as work:
        yield Path(work)


@functools.cache
def erofs_version() -> str:
    """The version of mkfs.erofs. Raises `tool-missing`."""
    try:
        said = run(["mkfs.erofs", "--version"], 30.0)  # 1.5 does not know the option, and says its version all the same
    except OperationError as cause:
        if cause.code is ErrorCode.TOOL_MISSING:
            raise OperationError(cause.code, cause.message, "Run `apt-get install erofs-utils`.") from cause
        raise
    found = re.search(rb"mkfs\.erofs \(?(?:erofs-utils\) )?(\d[\w.+-]*)", said.stdout + said.stderr)
    if found is None:
        raise OperationError(ErrorCode.BUILD_FAILED, f"cannot tell the version of mkfs.erofs: {said.last_words}")
    return found[1].decode()

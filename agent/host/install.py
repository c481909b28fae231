"""Resolves and caches everything that building a runtime for a target needs, so that `build` works without a network.

The boards' packages are chosen and verified, the prepared model is there and fits, every file the project names exists,
the tools are found. All that is missing is said at once, not one thing a run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent.contract.errors import ErrorCode, OperationError
from agent.host.bytecode import find_compiler
from agent.host.image import erofs_version
from agent.host.model import check_files, model_version, placement_line
from agent.host.project import ExtensionPart, Project
from agent.host.report import Report, megabytes
from agent.host.wheels import build_wheels


@dataclass(frozen=True, slots=True)
class Installed:
    """One thing that is ready, and where it lies."""

    what: str
    path: str
    size_bytes: int


def install(project: Project, runtime: str | None, report: Report) -> dict[str, Any]:
    """Fetch, or find cached, what `build` of that runtime takes. Raises `bad-project` naming all that is missing."""
    name, part = project.runtime(runtime)
    target = project.target
    found: list[Installed] = []
    missing: list[OperationError] = []
    for step in (lambda: _tools(project), *(_step(project, one, report) for one in part.extensions)):
        try:
            found += step()
        except OperationError as error:
            missing.append(error)
    for one in found:
        report.say(f"  {one.what}: {megabytes(one.size_bytes)}" if one.size_bytes else f"  {one.what}")
    if len(missing) == 1:
        raise missing[0]
    if missing:
        raise OperationError(
            ErrorCode.BAD_PROJECT,
            f"cannot build {name} for {target.board}: {len(missing)} things are missing: "
            + "; ".join(error.message.removeprefix("cannot ") for error in missing),
            " ".join(dict.fromkeys(error.remedy for error in missing if error.remedy)),
        )
    return {"runtime": name, "target": target.board, "installed": [asdict(one) for one in found]}


def _tools(project: Project) -> list[Installed]:
    minor = project.target.python
    compiler = find_compiler(minor)
    said = f"CPython {compiler.version} for bytecode" if compiler else f"no CPython {minor}: images carry sources only"
    return [Installed(f"mkfs.erofs {erofs_version()}", "", 0), Installed(said, "", 0)]


def _step(project: Project, name: str, report: Report) -> Any:
    def step() -> list[Installed]:
        report.show(f"resolving {name} for {project.target.board}")
        return _of_extension(project, name, project.document.extensions[name])

    return step


def _of_extension(project: Project, name: str, part: ExtensionPart) -> list[Installed]:
    found = []
    for source in (*part.overlay, *part.files.values(), *(part.python.packages if part.python else ())):
        if not project.path(source).exists():
            raise OperationError(ErrorCode.BAD_PROJECT, f"cannot build {name}: {project.path(source)} does not exist")
    if part.model is not None:
        folder = project.path(part.model)
        version = model_version(folder, project.target.accelerator)
        check_files(folder, project.target.accelerator)
        found.append(Installed(f"{name}: model {version} for {project.target.accelerator}", str(folder), _size(folder)))
        if line := placement_line(folder, project.target.accelerator):
            found.append(Installed(f"{name}: {line}", str(folder), 0))
    if part.python is not None and part.python.requirements is not None:
        lock = project.path(part.python.requirements)
        wheels = build_wheels(lock, project.target, project.build_folder / "cache")
        said = f"{name}: packages of {lock.name} for Python {project.target.python} on {project.target.arch}"
        found.append(Installed(said, str(wheels.folder), _size(wheels.folder)))
    return found


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())

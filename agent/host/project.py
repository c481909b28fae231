"""avocado.yaml: what a project puts on which board.

The document is closed (`schema.Closed`), read by a loader that makes no objects, and refused when a key stands twice,
since two readers of such a document see two projects. `{{ avocado.target.board }}`, `{{ avocado.target.accelerator }}`
and `{{ avocado.home }}` (the folder with units/, inference/ and requirements/) are replaced in every key and value; a
definition whose name is written out wins over a templated one. `docs/formats.md` lists every key.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, ValidationError, model_validator

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import MAX_EXTENSIONS, Name, Version
from agent.host.schema import Closed, first_problem
from agent.host.target import Target, known_targets, load_target, nearest

PROJECT_FILE = "avocado.yaml"
MAX_PROJECT_BYTES = 256 * 1024
HOME = Path(__file__).resolve().parents[2]

Kind = Literal["sysext", "confext"]

_TEMPLATE = re.compile(r"\{\{\s*([a-z_.]+)\s*\}\}")


def _inside(text: str) -> str:
    path = PurePosixPath(text)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{text!r} must be a path inside the image, such as usr/lib/pose")
    return str(path)


def _sysext() -> list[Kind]:
    return ["sysext"]


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# Unit and command lines end up in extension-release, one quoted line each.
Line = Annotated[str, StringConstraints(pattern=r"\A[^\n\"\\$`;]+$", max_length=400)]
Unit = Annotated[str, StringConstraints(pattern=r"\A[A-Za-z0-9:_.@-]+\.(service|socket|timer|path|mount|target)$")]
Inside = Annotated[str, AfterValidator(_inside)]
Mode = Annotated[str, StringConstraints(pattern=r"\A0?[0-7]{3}$")]
EntryPoint = Annotated[str, StringConstraints(pattern=r"\A[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]


class PythonPart(Closed):
    """Python code and its wheels, in one folder of the image with launchers of its own."""

    folder: Inside
    requirements: str | None = None  # a lock file with hashes
    packages: list[str] = Field(default_factory=list)  # folders of Python packages, copied as sources
    exclude: list[Inside] = Field(default_factory=list)  # of those packages
    launchers: dict[Name, EntryPoint] = Field(default_factory=dict)


class ExtensionPart(Closed):
    """One extension image."""

    version: Version | None = None  # a model's own when absent
    types: Annotated[list[Kind], Field(min_length=1, max_length=2)] = Field(default_factory=_sysext)
    summary: str = ""
    overlay: Annotated[list[str], BeforeValidator(_one_or_many)] = Field(default_factory=list)
    files: dict[Inside, str] = Field(default_factory=dict)  # path in the image -> file or folder
    modes: dict[Inside, Mode] = Field(default_factory=dict)  # for what is not 0644, 0755
    python: PythonPart | None = None
    model: str | None = None  # a folder made by `avocado-infer prepare`
    packages: list[Name] = Field(default_factory=list)  # what the base must supply
    enable_services: list[Unit] = Field(default_factory=list)
    upholds: list[Unit] = Field(default_factory=list)
    modprobe: list[Name] = Field(default_factory=list)
    on_merge: list[Line] = Field(default_factory=list)
    on_unmerge: list[Line] = Field(default_factory=list)
    reload_manager: bool = False

    @model_validator(mode="after")
    def _has_a_version(self) -> ExtensionPart:
        if self.version is None and self.model is None:
            raise ValueError("version is missing")
        return self


class RuntimePart(Closed):
    """An ordered list of extensions: the first one lies on top."""

    version: Version
    extensions: Annotated[list[Name], Field(min_length=1, max_length=MAX_EXTENSIONS)]
    requires_agent: Version | None = None
    allow_downgrade: bool = False
    confirm_within_s: Annotated[int, Field(ge=5, le=3600)] | None = None  # for a change of /etc; 60 when absent


class ProjectPart(Closed):
    """The whole document."""

    default_target: Name
    supported_targets: Annotated[list[Name], Field(min_length=1)]
    runtimes: Annotated[dict[Name, RuntimePart], Field(min_length=1)]
    extensions: Annotated[dict[Name, ExtensionPart], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> ProjectPart:
        if self.default_target not in self.supported_targets:
            raise ValueError(f"default_target {self.default_target!r} is not one of supported_targets")
        for name, runtime in self.runtimes.items():
            for extension in runtime.extensions:
                if extension not in self.extensions:
                    hint = nearest(extension, list(self.extensions), "use").rstrip(".")
                    raise ValueError(f"runtimes.{name}: no extension {extension!r} is defined; {hint}")
            if len(set(runtime.extensions)) != len(runtime.extensions):
                raise ValueError(f"runtimes.{name}: an extension is listed twice")
        return self


@dataclass(frozen=True, slots=True)
class Project:
    """A project as one target sees it; relative paths in it start at `folder`."""

    folder: Path
    target: Target
    document: ProjectPart

    @property
    def build_folder(self) -> Path:
        """Everything made for this project: images, caches, repositories."""
        return self.folder / "build"

    def path(self, text: str) -> Path:
        """A path written in the document."""
        return self.folder / text

    def runtime(self, name: str | None) -> tuple[str, RuntimePart]:
        """The runtime of that name, or the only one there is."""
        runtimes = self.document.runtimes
        if name is None and len(runtimes) == 1:
            return next(iter(runtimes.items()))
        if name is None:
            raise OperationError(
                ErrorCode.USAGE, "cannot choose a runtime: there are several", f"Add -r with {' or '.join(runtimes)}."
            )
        if name not in runtimes:
            raise OperationError(
                ErrorCode.NOT_FOUND, f"cannot build runtime {name!r}: not defined", nearest(name, list(runtimes), "Use")
            )
        return name, runtimes[name]


class _Loader(yaml.SafeLoader):
    """Safe YAML, without repeated keys and without aliases (a few lines of which can stand for gigabytes)."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(problem="aliases are not supported", problem_mark=self._where())
        return super().compose_node(parent, index)

    def _where(self) -> Any:
        return self.peek_event().start_mark  # type: ignore[no-untyped-call]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def find_project(start: Path) -> Path:
    """The folder with avocado.yaml, here or above. Raises `bad-project` when there is none."""
    here = start.resolve()
    for folder in (here, *here.parents):
        if (folder / PROJECT_FILE).is_file():
            return folder
    raise OperationError(
        ErrorCode.BAD_PROJECT,
        f"cannot find {PROJECT_FILE} in {here} or above",
        "Run `avocadoctl init --reference npu-pose my-project` to start from the reference application.",
    )


def load_project(folder: Path, board: str | None = None) -> Project:
    """Read a project for one board, or for its default one. Raises `bad-project`."""
    path = folder / PROJECT_FILE
    try:
        data = path.read_bytes()
        if len(data) > MAX_PROJECT_BYTES:
            raise _bad(path, f"{len(data)} bytes, limit {MAX_PROJECT_BYTES}")
        raw = yaml.load(data, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except OSError as cause:
        raise _bad(path, cause.strerror or str(cause)) from cause
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as cause:
        raise _bad(path, _yaml_problem(cause)) from cause
    if not isinstance(raw, dict):
        raise _bad(path, "not a mapping of keys")
    target = load_target(_chosen_board(path, raw, board), folder)
    words = {
        "avocado.target.board": target.board,
        "avocado.target.accelerator": target.accelerator,
        "avocado.home": str(HOME),
    }
    try:
        document = ProjectPart.model_validate(_fill(raw, words))
    except (ValidationError, ValueError) as cause:
        raise _bad(path, first_problem(cause)) from cause
    for name in document.supported_targets:
        if name not in known_targets(folder):
            raise _bad(
                path, f"supported_targets: no target {name!r}", nearest(name, sorted(known_targets(folder)), "Use")
            )
    return Project(folder.resolve(), target, document)


def _chosen_board(path: Path, raw: dict[str, Any], board: str | None) -> str:
    supported = raw.get("supported_targets")
    default = raw.get("default_target")
    if not isinstance(default, str) or not isinstance(supported, list):
        raise _bad(path, "default_target and supported_targets are missing")
    chosen = board or default
    if chosen not in supported:
        names = [str(name) for name in supported]
        raise OperationError(
            ErrorCode.WRONG_TARGET,
            f"cannot build for {chosen}: {path} does not support it",
            nearest(chosen, names, "Use"),
        )
    return chosen


def _fill(value: Any, words: dict[str, str]) -> Any:
    """Replace the template words in every key and value; a key that was written out wins over a templated one."""
    if isinstance(value, str):
        return _fill_text(value, words)
    if isinstance(value, list):
        return [_fill(item, words) for item in value]
    if isinstance(value, dict):
        filled: dict[Any, Any] = {}
        for key, item in sorted(value.items(), key=lambda pair: "{{" not in str(pair[0])):
            filled[_fill(key, words)] = _fill(item, words)
        return filled
    return value


def _fill_text(text: str, words: dict[str, str]) -> str:
    def replace(match: re.Match[str]) -> str:
        if match[1] not in words:
            raise ValueError(f"{match[0]} is not known; known: {', '.join(words)}")
        return words[match[1]]

    return _TEMPLATE.sub(replace, text)


def _yaml_problem(cause: Exception) -> str:
    if isinstance(cause, yaml.MarkedYAMLError) and cause.problem_mark is not None:
        return f"line {cause.problem_mark.line + 1}: {cause.problem}"
    return first_problem(cause)


def _bad(path: Path, said: str, remedy: str = "") -> OperationError:
    if not remedy and "valid string" in said:
        remedy = "Put the value in quotes."
    return OperationError(ErrorCode.BAD_PROJECT, f"cannot read {path}: {said}", remedy)

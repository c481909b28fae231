"""What `avocadoctl init` changes in a new project's avocado.yaml: the target line and the runtime's name, no more.

The file is edited as text, so that its comments stay, and read back, so that a project never begins broken.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Name
from agent.host.project import PROJECT_FILE, load_project
from agent.host.target import known_targets, nearest

_TARGET = re.compile(r"^default_target: .*$", re.MULTILINE)
_SUPPORTED = "supported_targets: [virtual]"
_RUNTIME = re.compile(r"^(runtimes:\n  )[^:\n]+:", re.MULTILINE)


def refuse_unknown(target: str | None, runtime: str | None) -> None:
    """Refuse a board nobody knows or a runtime's name no manifest takes, before anything is written."""
    if target is not None and target not in known_targets():
        raise OperationError(
            ErrorCode.NOT_FOUND,
            f"cannot start a project for {target!r}: no such target",
            nearest(target, sorted(known_targets()), "Use"),
        )
    if runtime is None:
        return
    try:
        TypeAdapter(Name).validate_python(runtime)
    except ValidationError as cause:
        raise OperationError(ErrorCode.USAGE, f"cannot call a runtime {runtime!r}: not a plain name") from cause


def rewrite(folder: Path, target: str | None, runtime: str | None) -> None:
    """Put the target and the runtime's name into the folder's avocado.yaml."""
    path = folder / PROJECT_FILE
    text = path.read_text(encoding="utf-8")
    if target is not None:
        text = _TARGET.sub(f"default_target: {target}", text, count=1)
        text = text.replace(_SUPPORTED, f"supported_targets: [{target}]")
    if runtime is not None:
        text = _RUNTIME.sub(rf"\g<1>{runtime}:", text, count=1)
    path.write_text(text, encoding="utf-8")
    load_project(folder)

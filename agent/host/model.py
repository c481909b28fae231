"""What the build needs to know of a prepared model folder: its version, that it fits the board, what the board loads.

One folder may carry the files of several accelerators; an image carries those of its own board and the CPU's. The pose
service owns `model.json` and checks all of it when it loads; here only a model that this board could not run at all is
stopped, before it is signed.
"""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path, PurePosixPath
from typing import Any

from agent.contract.errors import ErrorCode, OperationError

CPU = "cpu"
_DOCUMENT = "model.json"
_MAX_BYTES = 4 << 20


def model_version(folder: Path, accelerator: str) -> str:
    """The model's version. Raises `bad-project` when it was not prepared for the accelerator."""
    document = _read(folder)
    files = document.get("files")
    made_for = sorted(files) if isinstance(files, dict) else []
    for wanted in (accelerator, CPU):
        if wanted not in made_for:
            raise OperationError(
                ErrorCode.BAD_PROJECT,
                f"cannot use model {folder}: not prepared for {wanted}, only for {', '.join(made_for) or 'nothing'}",
                f"Run `avocado-infer prepare` with --target {accelerator}; repeat --target for several boards.",
            )
    version = document.get("version")
    if not isinstance(version, str):
        raise OperationError(ErrorCode.BAD_PROJECT, f"cannot use model {folder}: model.json has no version")
    return version


def placement_line(folder: Path, accelerator: str) -> str:
    """How much of the model the accelerator takes, for a person; empty where nobody could tell."""
    found = _read(folder).get("placement", {}).get(accelerator)
    if not isinstance(found, dict):
        return ""
    taken, left = (sum(found.get(side, {}).values()) for side in ("accelerated", "cpu"))
    pieces = found.get("partitions", 0)
    return (
        f"{accelerator} takes {taken} of {taken + left} operators of the model "
        f"in {pieces} piece{'' if pieces == 1 else 's'}, {left} stay on the CPU"
    )


def keep_only(folder: Path, accelerator: str) -> None:
    """Take away from a copied model folder what this accelerator's board never loads; what it loads stays as it is."""
    document = _read(folder)
    files = document["files"]
    kept = {name: file for name, file in files.items() if name in (accelerator, CPU)}
    if len(kept) == len(files):
        return
    needed = {file["path"] for file in kept.values()}
    for path in {file["path"] for file in files.values()} - needed:
        if PurePosixPath(path).name == path:
            (folder / path).unlink(missing_ok=True)
    others = files.keys() - kept.keys()
    _drop(document, others)
    requirements = document.get("requirements", {})
    own = requirements.get("accelerators", {}).get(accelerator, {})
    if "latency_p95_ms" in own:
        requirements["latency_p95_ms"] = own["latency_p95_ms"]
    (folder / _DOCUMENT).write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _drop(value: dict[str, Any], names: Set[str]) -> None:
    """Every key of these names, at any depth: model.json names an accelerator only where it speaks of it."""
    for key in list(value):
        if key in names:
            del value[key]
        elif isinstance(value[key], dict):
            _drop(value[key], names)


def _read(folder: Path) -> dict[str, Any]:
    path = folder / _DOCUMENT
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise OperationError(ErrorCode.BAD_PROJECT, f"cannot read {path}: larger than {_MAX_BYTES} bytes")
        document = json.loads(path.read_bytes())
    except FileNotFoundError as cause:
        raise OperationError(
            ErrorCode.BAD_PROJECT,
            f"cannot use model {folder}: it has no model.json",
            "Run `make model`, or `avocado-infer prepare` for a model of your own.",
        ) from cause
    except (OSError, ValueError, RecursionError) as cause:
        raise OperationError(ErrorCode.BAD_PROJECT, f"cannot read {path}: {cause}") from cause
    if not isinstance(document, dict):
        raise OperationError(ErrorCode.BAD_PROJECT, f"cannot read {path}: not a JSON object")
    return document

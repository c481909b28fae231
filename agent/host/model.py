"""What the build needs to know of a prepared model folder: its version, and that it fits the board.

The pose service owns `model.json` and checks all of it when it loads; here only a model that this board could not run
at all is stopped, before it is signed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agent.contract.errors import ErrorCode, OperationError

_MAX_BYTES = 4 << 20


def model_version(folder: Path, accelerator: str) -> str:
    """The model's version. Raises `bad-project` when it was not prepared for the accelerator."""
    document = _read(folder)
    files = document.get("files")
    made_for = sorted(files) if isinstance(files, dict) else []
    for wanted in (accelerator, "cpu"):
        if wanted not in made_for:
            raise OperationError(
                ErrorCode.BAD_PROJECT,
                f"cannot use model {folder}: not prepared for {wanted}, only for {', '.join(made_for) or 'nothing'}",
                f"Run `avocado-infer prepare` with a target whose accelerator is {accelerator}.",
            )
    version = document.get("version")
    if not isinstance(version, str):
        raise OperationError(ErrorCode.BAD_PROJECT, f"cannot use model {folder}: model.json has no version")
    return version


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "model.json"
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

"""What the build needs to know of a prepared model folder: its version, that it fits the board, what the board loads.

One folder may carry the files of several accelerators; an image carries those of its own board and the CPU's. The pose
service owns `model.json` and checks all of it when it loads; here what this board could not load is stopped before it
is signed: a model made for others, a file that is missing or is not the one that was made.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Set
from pathlib import Path, PurePosixPath
from typing import Any

from agent.contract.errors import ErrorCode, OperationError

CPU = "cpu"
_DOCUMENT = "model.json"
_MAX_BYTES = 4 << 20
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def model_version(folder: Path, accelerator: str) -> str:
    """The model's version. Raises `bad-project` when it was not prepared for the accelerator."""
    document = _read(folder)
    made_for = sorted(_object(folder, document, "files"))
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


def check_files(folder: Path, accelerator: str) -> None:
    """Every file the accelerator's board loads is there and is the one that was made. Raises `bad-project`."""
    document = _read(folder)
    files = _object(folder, document, "files")
    loaded = _object(folder, document, "digests")
    for name, file in files.items():
        path, sha256 = (file.get("path"), file.get("sha256")) if isinstance(file, dict) else (None, None)
        if not (isinstance(path, str) and _PLAIN.fullmatch(path) and isinstance(sha256, str)):
            raise _damaged(folder, f"files.{name} of model.json has no plain file name with a sha256")
        if name in (accelerator, CPU) and loaded.setdefault(path, sha256) != sha256:
            raise _damaged(folder, f"model.json gives {path} two different sha256")
    for path, sha256 in loaded.items():
        if not _PLAIN.fullmatch(path):
            raise _damaged(folder, f"digests of model.json has {path!r}, which is no plain file name")
        found = _digest(folder, path)
        if found != sha256:
            raise _damaged(folder, f"{path} has sha256 {found}, model.json says {sha256}")


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


def _digest(folder: Path, name: str) -> str:
    path = folder / name
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise _damaged(folder, f"{name} is not a regular file")
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as cause:
        raise _damaged(folder, f"{name}: {getattr(cause, 'strerror', None) or cause}") from cause


def _object(folder: Path, document: dict[str, Any], key: str) -> dict[str, Any]:
    found = document.get(key, {})
    if not isinstance(found, dict):
        raise _damaged(folder, f"{key} of model.json is not an object")
    return found


def _damaged(folder: Path, cause: str) -> OperationError:
    return OperationError(ErrorCode.BAD_PROJECT, f"cannot use model {folder}: {cause}", "Prepare the model again.")


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

"""What a board is, as data: processor, Python, base system, accelerator. One TOML file per board.

The files beside this module describe the boards this project knows; a project's own `targets/` folder adds boards or
replaces one. Nothing else in the host's half knows a board's name.
"""

from __future__ import annotations

import difflib
import platform
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from agent.contract.errors import ErrorCode, OperationError
from agent.host.schema import first_problem

OWN_TARGETS = Path(__file__).parent / "targets"
# systemd's names, which extension-release compares with the running system's.
_SYSTEMD_ARCHITECTURE = {"x86_64": "x86-64", "aarch64": "arm64"}

Word = Annotated[str, StringConstraints(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


@dataclass(frozen=True, slots=True)
class Target:
    """A board, as far as building for it goes."""

    board: str
    arch: Literal["x86_64", "aarch64"]
    python: str  # minor version, "3.13"
    manylinux: str  # the newest manylinux policy its C library satisfies, "2_28"
    os_id: str
    os_version_id: str
    soc: str
    accelerator: str  # the profile's name in inference/accelerators

    @property
    def python_platform(self) -> str:
        """The board's wheels, as uv names them."""
        return f"{self.arch}-manylinux_{self.manylinux}"

    @property
    def systemd_architecture(self) -> str:
        """The board's processor, as `ARCHITECTURE=` in an extension-release wants it."""
        return _SYSTEMD_ARCHITECTURE[self.arch]


class _OsRelease(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    ID: Word
    VERSION_ID: Word


class _TargetFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    arch: Literal["x86_64", "aarch64", "native"]
    python: Annotated[str, StringConstraints(pattern=r"\A3\.\d{1,2}$")]
    manylinux: Annotated[str, StringConstraints(pattern=r"\A2_\d{2}$")]
    soc: Word
    accelerator: Word
    os_release: _OsRelease


def known_targets(project_folder: Path | None = None) -> dict[str, Path]:
    """Every board's name and file; a project's own file replaces the one of the same name."""
    folders = [OWN_TARGETS, *([project_folder / "targets"] if project_folder else [])]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def load_target(board: str, project_folder: Path | None = None) -> Target:
    """The board of that name. Raises `bad-project` for an unknown name or a bad file."""
    known = known_targets(project_folder)
    if board not in known:
        raise OperationError(
            ErrorCode.BAD_PROJECT, f"cannot build for {board!r}: no such target", nearest(board, sorted(known), "Use")
        )
    path = known[board]
    try:
        found = _TargetFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (ValidationError, tomllib.TOMLDecodeError, UnicodeDecodeError) as cause:
        raise OperationError(ErrorCode.BAD_PROJECT, f"cannot read target {path}: {first_problem(cause)}") from cause
    return Target(
        board=board,
        arch=native_arch() if found.arch == "native" else found.arch,
        python=found.python,
        manylinux=found.manylinux,
        os_id=found.os_release.ID,
        os_version_id=found.os_release.VERSION_ID,
        soc=found.soc,
        accelerator=found.accelerator,
    )


def native_arch() -> Literal["x86_64", "aarch64"]:
    """This machine's processor. Raises `unsupported` for one no board here has."""
    machine = platform.machine()
    if machine == "x86_64":
        return "x86_64"
    if machine in ("aarch64", "arm64"):
        return "aarch64"
    raise OperationError(ErrorCode.UNSUPPORTED, f"cannot build for this machine's processor: {machine}")


def nearest(wrong: str, known: Sequence[str], verb: str) -> str:
    """A remedy that names the nearest known word, or all of them."""
    close = difflib.get_close_matches(wrong, known, n=1, cutoff=0.6)
    return f"{verb} {close[0]}." if close else f"{verb} one of: {', '.join(known)}."

"""The agent's configuration: one frozen value, read once at start.

Everything has a default that fits a board; `/etc/avocado/agent.toml` is optional. A key nobody knows is refused by
name, because a misspelt time limit that is silently ignored is found out at the worst moment.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent.contract.errors import ErrorCode, OperationError

CONFIG_PATH = Path("/etc/avocado/agent.toml")

Seconds = Annotated[float, Field(gt=0, le=3600)]


class Config(BaseModel):
    """Where things are and how often the status is written again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    state_dir: Path = Path("/var/lib/avocado")
    run_dir: Path = Path("/run/avocado")
    # systemd's fallback for readers of a dead agent's status is its age, so this is also how old it may look.
    status_interval_s: Seconds = 5.0
    shutdown_grace_s: Seconds = 10.0
    start_timeout_s: Seconds = 60.0
    command_timeout_s: Seconds = 30.0
    history_limit: Annotated[int, Field(ge=1, le=100_000)] = 500
    # auto: without a gap where the kernel and the overlays allow it, else by systemd's own reload.
    overlay: Literal["auto", "reload"] = "auto"
    # Every change that brings another model is tried beside the one that serves, before anything is stopped.
    warm_up: bool = False


def load_config(path: Path = CONFIG_PATH) -> Config:
    """Read the configuration; a file that is not there means the defaults. Raises `bad-config`."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Config()
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as cause:
        raise _bad(path, str(cause)) from cause
    try:
        return Config.model_validate(document)
    except ValidationError as cause:
        first = cause.errors(include_url=False)[0]
        raise _bad(path, f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from cause


def _bad(path: Path, why: str) -> OperationError:
    return OperationError(
        ErrorCode.BAD_CONFIG, f"cannot read {path}: {why}", f"Correct {path}, then: systemctl restart avocadod"
    )

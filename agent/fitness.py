"""Whether a board may run a runtime, as far as that is known before anything is fetched.

Pure. Target, architecture, interpreter, agent, operating system, and extension compatibility of the images that are on
the board already. Raises OperationError for the first thing that does not fit, with what to type.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Manifest
from agent.contract.release import Kind, incompatibility

RESTART_AGENT = "systemctl restart avocadod"


class Board(Protocol):
    """What has to be known of the board (plan.Observed)."""

    @property
    def target(self) -> str:
        """Its name; empty before it is provisioned."""

    @property
    def arch(self) -> str:
        """x86_64 or aarch64."""

    @property
    def python(self) -> str:
        """Minor version such as "3.13"."""

    @property
    def agent_version(self) -> str:
        """Of the agent that runs."""

    @property
    def newer_agent(self) -> str:
        """The version of the agent that is merged, where it is another one than runs."""

    @property
    def os_release(self) -> Mapping[str, str]:
        """Of the base."""

    @property
    def releases(self) -> Mapping[str, Mapping[Kind, Mapping[str, str]]]:
        """Extension-release keys by image id and kind."""


def check_board(board: Board, manifest: Manifest, what: str) -> None:
    """Whether this board may run this runtime; `what` begins the refusal."""
    if manifest.os_bundle is not None:
        raise OperationError(
            ErrorCode.UNSUPPORTED,
            f"{what}: it brings an OS bundle, and this agent does not update the operating system",
            "Build the runtime without 'os_bundle' and update the OS with its own tool.",
        )
    if manifest.target != board.target:
        raise OperationError(
            ErrorCode.WRONG_TARGET,
            f"{what}: it is for target {manifest.target}, this board is {board.target or 'of no known target'}",
            f"Build it for this board: 'avocadoctl build --target {board.target or 'TARGET'}'.",
        )
    if manifest.arch != board.arch:
        raise OperationError(ErrorCode.WRONG_TARGET, f"{what}: it is for {manifest.arch}, this board is {board.arch}")
    _check_requirements(board, manifest, what)
    _check_extensions(board, manifest, what)


def _check_requirements(board: Board, manifest: Manifest, what: str) -> None:
    requires = manifest.requires
    if requires.python is not None and requires.python != board.python:
        raise OperationError(
            ErrorCode.REQUIREMENT_UNMET,
            f"{what}: it needs Python {requires.python}, this board has {board.python}",
            f"Build it for Python {board.python}: set it in the target's file.",
        )
    if requires.agent is not None and _version(board.agent_version) < _version(requires.agent):
        raise OperationError(
            ErrorCode.REQUIREMENT_UNMET,
            f"{what}: it needs agent {requires.agent}, this board runs {board.agent_version}",
            f"Run '{RESTART_AGENT}' on the board: agent {board.newer_agent} is merged and does not run yet."
            if board.newer_agent
            else f"Deploy a runtime that only updates avocado-agent, then run '{RESTART_AGENT}' on the board.",
        )
    for key, value in requires.os.items():
        if board.os_release.get(key) != value:
            raise OperationError(
                ErrorCode.REQUIREMENT_UNMET,
                f"{what}: it needs {key}={value}, this board has {key}={board.os_release.get(key, '')}",
                "Build it for the operating system of this board.",
            )


def _check_extensions(board: Board, manifest: Manifest, what: str) -> None:
    for extension in manifest.extensions:
        known = board.releases.get(extension.image_id, {})
        for kind in extension.types:
            if Kind(kind) not in known:
                continue  # inside an image that is not here yet; stage_runtime looks
            why = incompatibility(known[Kind(kind)], Kind(kind), board.os_release, board.arch)
            if why:
                raise OperationError(
                    ErrorCode.INCOMPATIBLE,
                    f"{what}: systemd would ignore extension {extension.name} {extension.version}: {why}",
                    "Build the extension for the operating system of this board.",
                )


def _version(text: str) -> tuple[int, ...]:
    """The numbers of a version; what follows the first other character does not order it."""
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in numbers.group().split(".")) if numbers else ()

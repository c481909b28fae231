"""Looks inside an image that is not merged: its extension-release keys, and whether systemd would take it at all.

The mount happens in a child process with a mount namespace of its own (image_child.py), so an image that crashes or
stalls the kernel's reader takes nothing of the agent with it, and no mount is ever left. Everything is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.contract.errors import ErrorCode, OperationError
from agent.extensions import parse_release
from agent.ports import child, image_child, mounts
from agent.ports.process import run_checked
from agent.ports.protocols import Kind

_TIMEOUT_S = 20.0


class MountedImages:
    """The ImageReader port by a private loop mount."""

    def __init__(self) -> None:
        self._command = child.command(mounts, image_child)

    def release(self, image: Path, name: str, kind: Kind) -> dict[str, str]:
        """The image's extension-release keys. Raises `bad-image` when it is absent, not a plain file, or unreadable."""
        answer = self._ask({"image": str(image), "kind": kind.value, "name": name})
        if "error" in answer:
            raise OperationError(
                ErrorCode.BAD_IMAGE,
                f"cannot merge extension {name} ({image.name}): {answer['error']}",
                "Build the extension again with 'avocadoctl build' and deploy it.",
                {"image": image.name, "extension": name},
            )
        return parse_release(answer["answer"].encode(), f"the release file of extension {name}")

    def carried(self, image: Path, paths: Sequence[str]) -> frozenset[str]:
        """Those of the absolute paths at which the image has a file. Raises `bad-image` when it cannot be mounted."""
        if not paths:
            return frozenset()
        answer = self._ask({"image": str(image), "paths": list(paths)})
        if "error" in answer:
            raise OperationError(
                ErrorCode.BAD_IMAGE,
                f"cannot look into image {image.name}: {answer['error']}",
                "Deploy the runtime again from the host.",
                {"image": image.name},
            )
        return frozenset(answer["answer"])

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        stdin = json.dumps(request).encode()
        finished = run_checked(self._command, _TIMEOUT_S, failure=ErrorCode.BAD_IMAGE, stdin=stdin)
        answer: dict[str, Any] = json.loads(finished.stdout)
        return answer

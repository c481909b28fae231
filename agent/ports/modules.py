"""The module index of a set: a small image made on the board, merged over everything, so that modprobe finds them all.

/usr is read-only, so an index cannot be made after the merge; and it depends on the base's modules, so it cannot be
made on the host. It is an image like the others: named by its content, linked into the runtime, merged at boot by
systemd with none of our code.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.contract import errors, release
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import MODULE_INDEX, Extension, image_id, sha256_hex
from agent.ports import child, hierarchies, image_child, module_child, mounts, process
from agent.ports.erofs import image_of
from agent.ports.process import run_checked
from agent.ports.protocols import Kind, Store

_TIMEOUT_S = 90.0
_MAX_INDEX_BYTES = 64 << 20
_RELEASE = f"usr/lib/extension-release.d/extension-release.{MODULE_INDEX}"


class DepmodIndexer:
    """The ModuleIndexer port with the base's depmod."""

    def __init__(self, store: Store, namespace: str = hierarchies.HOST) -> None:
        self._store = store
        self._namespace = namespace
        self._command = child.command(errors, release, process, mounts, image_child, hierarchies, module_child)

    def index(self, extensions: Sequence[Extension]) -> str | None:
        """The image with the index over the base and these extensions, or None where none of them has modules."""
        paths = [path for path in map(self._image, extensions) if path is not None]
        files = self._ask({"images": [str(path) for path in reversed(paths)], "namespace": self._namespace})["files"]
        if not files:
            return None
        tree = {f"usr/lib/modules/{path}": base64.b64decode(text) for path, text in files.items()}
        # For every system: it was made on this one. Without the attribute systemd insists on the link's name.
        image = image_of(tree | {_RELEASE: b"ID=_any\n"}, {_RELEASE: {"extension-release.strict": b"0"}})
        return self._stored(image)

    def _image(self, extension: Extension) -> Path | None:
        return self._store.image(extension.image_id) if Kind.SYSEXT in extension.types else None

    def _stored(self, image: bytes) -> str:
        sha256 = sha256_hex(image)
        made = Extension(
            name=MODULE_INDEX,
            version="1",
            image_id=image_id(sha256),
            sha256=sha256,
            size_bytes=len(image),
            types=["sysext"],
        )
        if not self._store.verify_image(made):
            self._store.write_image(made, image)
        return made.image_id

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        stdin = json.dumps(request).encode()
        finished = run_checked(
            self._command, _TIMEOUT_S, failure=ErrorCode.BAD_IMAGE, stdin=stdin, max_output_bytes=_MAX_INDEX_BYTES
        )
        answer: dict[str, Any] = json.loads(finished.stdout)
        if "error" in answer:
            raise OperationError.from_dict(answer["error"])
        return answer

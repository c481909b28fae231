"""The runtimes on the disk, as far as their manifests can be read, and the active one where it cannot.

What is active must be stopped, switched, started and guarded whatever became of its manifest: then its links speak for
it. Every other runtime whose manifest is damaged is only named.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from agent.contract.errors import OperationError
from agent.contract.linked import LinkedRuntime, linked_runtime
from agent.contract.manifest import Manifest
from agent.ports.protocols import Runtimes

_LOG = logging.getLogger("avocado.staged")


def read_manifests(runtimes: Runtimes) -> tuple[dict[str, Manifest], list[OperationError]]:
    """Every manifest that can be read, and what is wrong with the others."""
    found: dict[str, Manifest] = {}
    errors: list[OperationError] = []
    for runtime in runtimes.ids():
        try:
            found[runtime] = runtimes.manifest(runtime)
        except OperationError as error:
            errors.append(error)
    return found, errors


def linked_active(runtimes: Runtimes, manifests: Mapping[str, Manifest]) -> LinkedRuntime | None:
    """The active runtime as its links tell it, where it is none of these manifests."""
    active = runtimes.active()
    if active is None or active in manifests:
        return None
    return linked_runtime(active, runtimes.links(active), manifests.values())


def active_manifest(runtimes: Runtimes) -> Manifest | None:
    """The active runtime, as its links tell it where its manifest is damaged; None where none is active."""
    active = runtimes.active()
    try:
        return runtimes.manifest(active) if active else None
    except OperationError as error:
        _LOG.warning("%s", error.message)
        return linked_active(runtimes, read_manifests(runtimes)[0])

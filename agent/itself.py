"""Which agent runs and which is merged: a change leaves the agent that makes it alone, so the two may differ.

Told apart by image, since a version may stand for several builds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from agent.contract.errors import OperationError
from agent.contract.manifest import Manifest
from agent.contract.status import ProblemEntry
from agent.fitness import RESTART_AGENT
from agent.plan import AGENT_EXTENSION
from agent.ports.protocols import Kind, MergedSet, Overlay

_LOG = logging.getLogger("avocado.itself")


def started_from(overlay: Overlay) -> str | None:
    """Asked at the start: the image this agent was started from; None: the base, or nobody can tell."""
    try:
        return _image(overlay.merged())
    except OperationError as error:  # the status will say so too
        _LOG.warning("%s", error.message)
        return None


def newer_agent(running: str | None, merged: MergedSet, manifests: Iterable[Manifest]) -> str:
    """The version of the agent that is merged, where it is another image than the one that runs."""
    image = _image(merged)
    if image is None or running in (None, image):
        return ""
    return next((e.version for m in manifests for e in m.extensions if e.image_id == image), "of another build")


def agent_problems(newer: str) -> list[ProblemEntry]:
    """What to type for it."""
    if not newer:
        return []
    return [
        {
            "code": "agent-outdated",
            "message": f"{AGENT_EXTENSION} {newer} is merged, and the agent still runs from the image before it",
            "remedy": f"Run: {RESTART_AGENT}",
        }
    ]


def _image(merged: MergedSet) -> str | None:
    images = merged.images.get(Kind.SYSEXT, {})
    return next((image for link, image in images.items() if link.partition("-")[2] == AGENT_EXTENSION), None)

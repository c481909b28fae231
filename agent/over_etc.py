"""What lies over /etc and what a change would lay there, and how long such a change waits for its host.

Pure. Judged by what is merged now, whoever merged it: a bad /etc can lock everybody out of a board.
"""

from __future__ import annotations

from agent.contract.manifest import Manifest
from agent.extensions import Kind, MergedSet

CONFIRM_WITHIN_S = 60.0


def changes_etc(merged: MergedSet, shown: Manifest | None, to: Manifest | None) -> bool:
    """Whether other images will lie over /etc, or in another order; `shown`: the runtime that is merged now."""
    return _now(merged, shown) != [image for _, image in _of(to)]


def within_s(manifest: Manifest | None) -> float:
    """How long the host has to come back: as the runtime says, within reason."""
    said = manifest.confirm.get("within_s") if manifest else None
    return float(said) if isinstance(said, int | float) and 5 <= said <= 3600 else CONFIRM_WITHIN_S


def _of(manifest: Manifest | None) -> list[tuple[str, str]]:
    """Merge name and image of whatever a runtime lays over /etc, highest first."""
    extensions = [e for e in manifest.extensions if Kind.CONFEXT in e.types] if manifest else []
    return [(manifest.link_name(e).removesuffix(".raw"), e.image_id) for e in extensions] if manifest else []


def _now(merged: MergedSet, shown: Manifest | None) -> list[str]:
    """The images that lie over /etc, whoever merged them, highest first; the name of one that nobody knows."""
    images = merged.images.get(Kind.CONFEXT, dict(_of(shown)))
    names = sorted(merged.names.get(Kind.CONFEXT, ()), reverse=True)
    return [images.get(name, name) for name in names]

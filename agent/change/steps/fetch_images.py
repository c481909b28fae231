"""fetch_images: every wanted image is in the store, its bytes read back from the disk and hashed.

Undo leaves them: they are named by content and harm nobody; prune decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent.change.step import Inputs, Memo, Report
from agent.change.steps.releases import extensions_of
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Extension
from agent.ports.protocols import Fetched, Source, Store


@dataclass(frozen=True, slots=True)
class FetchImages:
    """Inputs: `source` (or None), `extensions`, `held` (bases for deltas). Facts: image_bytes, moved_bytes, images."""

    store: Store
    source_for: Callable[[str], Source]  # the open, verified source; whoever opened it closes it

    kind = "fetch_images"
    commits = False
    volatile = False
    cancellable = True

    def prepare(self, inputs: Inputs) -> Memo:
        """Nothing needs to be remembered: images already there stay as they are."""
        return {}

    def do(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """Every image is there and hashes to its name."""
        wanted = extensions_of(inputs["extensions"])
        missing = [extension for extension in wanted if not self.store.verify_image(extension)]
        arrived = self._fetch(inputs, missing, report) if missing else {}
        report.fact("image_bytes", sum(extension.size_bytes for extension in missing))
        report.fact("moved_bytes", sum(fetched.moved_bytes for fetched in arrived.values()))
        report.fact("images", [_fact(extension, arrived.get(extension.image_id)) for extension in wanted])

    def _fetch(self, inputs: Inputs, missing: Sequence[Extension], report: Report) -> dict[str, Fetched]:
        if inputs["source"] is None:
            first = missing[0]
            raise OperationError(
                ErrorCode.HASH_MISMATCH,
                f"cannot use image {first.image_id} of extension {first.name}: it is missing or damaged on this board",
                "Deploy the runtime again from the host.",
            )
        source = self.source_for(inputs["source"])
        held = [extension for extension in extensions_of(inputs["held"]) if self.store.verify_image(extension)]
        sizes = {extension.image_id: source.transfer_sizes(extension, held)[0] for extension in missing}
        total = sum(sizes.values())
        before = 0
        arrived: dict[str, Fetched] = {}
        report.progress(0, total)
        for extension in missing:
            arrived[extension.image_id] = source.fetch(
                extension,
                held,
                lambda done, _, start=before: report.progress(start + done, total),  # type: ignore[misc]
            )
            before += sizes[extension.image_id]
            report.progress(before, total)
        return arrived

    def undo(self, inputs: Inputs, memo: Memo) -> None:
        """Leaves them."""


def _fact(extension: Extension, fetched: Fetched | None) -> dict[str, object]:
    return {
        "name": extension.name,
        "image_id": extension.image_id,
        "size_bytes": extension.size_bytes,
        "way": fetched.way if fetched else "held",
        "base_image_id": fetched.base_image_id if fetched else None,
        "moved_bytes": fetched.moved_bytes if fetched else 0,
    }

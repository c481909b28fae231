"""fetch_images: every wanted image is in the store, its bytes read back from the disk and hashed.

Undo leaves them: they are named by content and harm nobody; prune decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agent.change.step import Inputs, Memo, Report
from agent.change.steps.releases import extensions_of
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Extension
from agent.ports.protocols import Fetched, Source, Store


@dataclass(frozen=True, slots=True)
class FetchImages:
    """Inputs: `source` (or None), `extensions`, `held` (bases for deltas).

    Facts: image_bytes, moved_bytes (everything that was moved, metadata included), and for each of `images` the way it
    took, its own moved_bytes and, where a cheaper way could not be taken, a `note` that says why.
    """

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
        report.fact("moved_bytes", self.source_for(inputs["source"]).moved_bytes() if arrived else 0)
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
        bases = extensions_of(inputs["held"])
        held = [extension for extension in bases if self.store.verify_image(extension)]
        damaged = {extension.name: extension for extension in bases if extension not in held}
        sizes = {extension.image_id: source.transfer_sizes(extension, held)[0] for extension in missing}
        total = sum(sizes.values())
        before = 0
        arrived: dict[str, Fetched] = {}
        report.progress(0, total)
        for extension in missing:
            fetched = source.fetch(
                extension,
                held,
                lambda done, _, start=before: report.progress(start + done, total),  # type: ignore[misc]
            )
            base = damaged.get(extension.name)
            if fetched.way == "full" and base and not fetched.note:
                fetched = replace(fetched, note=f"image {base.image_id} of {base.name} {base.version} is damaged")
            arrived[extension.image_id] = fetched
            before += sizes[extension.image_id]
            report.progress(before, total)
        return arrived

    def undo(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """Leaves them."""


def _fact(extension: Extension, fetched: Fetched | None) -> dict[str, object]:
    return {
        "name": extension.name,
        "image_id": extension.image_id,
        "size_bytes": extension.size_bytes,
        "way": fetched.way if fetched else "held",
        "base_image_id": fetched.base_image_id if fetched else None,
        "moved_bytes": fetched.moved_bytes if fetched else 0,
        "note": fetched.note if fetched else "",
    }

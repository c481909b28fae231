"""prune: runtimes that are neither active nor previous are gone, and images that no remaining runtime lists.

So is what was begun of an image that nobody wants any more, or that has arrived whole since.

Files that are no images of ours are never touched. Of a runtime whose manifest cannot be read the images that its links
lead to are kept; where they cannot be read whole or there are none, no image is removed: it may list any of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.change.step import Inputs, Memo, Report
from agent.contract.errors import OperationError
from agent.ports.protocols import Kind, Runtimes, Store


@dataclass(frozen=True, slots=True)
class Prune:
    """Inputs: `keep` (runtime ids) and optionally `keep_images`. Active and previous are kept in any case."""

    runtimes: Runtimes
    store: Store

    kind = "prune"
    commits = False
    volatile = False
    cancellable = True

    def prepare(self, inputs: Inputs) -> Memo:
        """Nothing: what is unreferenced is worked out when it is removed."""
        return {}

    def do(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """Only what is still needed is on the disk."""
        keep = {*inputs["keep"], self.runtimes.active(), self.runtimes.previous()}
        for runtime_id in self.runtimes.ids():
            if runtime_id not in keep:
                self.runtimes.remove(runtime_id)
        used = set(inputs.get("keep_images", ()))
        unknown = []
        for runtime_id in self.runtimes.ids():
            listed = self._listed(runtime_id)
            if listed is None:
                unknown.append(runtime_id)
            used.update(listed or ())
            used.update(filter(None, [self.runtimes.module_index(runtime_id)]))
        if unknown:
            report.warn(
                f"no image was removed: neither the manifest nor the links of runtime {unknown[0]} tell which it needs"
            )
        unused = [] if unknown else [image_id for image_id in self.store.image_ids() if image_id not in used]
        for image_id in unused:
            self.store.remove_image(image_id)
        whole = set(self.store.image_ids())
        for image_id in self.store.begun():
            if image_id not in used or image_id in whole:
                self.store.remove_part(image_id)
        if unused:
            report.fact("pruned_images", len(unused))

    def _listed(self, runtime_id: str) -> set[str] | None:
        try:
            return {extension.image_id for extension in self.runtimes.manifest(runtime_id).extensions}
        except OperationError:
            links = self.runtimes.links(runtime_id)
            linked = {image for named in links.values() for image in named.values()}
            return linked if linked and all(kind in links for kind in Kind) else None

    def undo(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """What nobody refers to is not brought back."""

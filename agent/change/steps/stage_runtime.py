"""stage_runtime: the runtime's folder is complete and durable, and systemd would take every image in it.

Where images bring kernel modules, the index over theirs and the base's is made here and is part of the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.change.step import Inputs, Memo, Report
from agent.change.steps.releases import Releases
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Manifest
from agent.extensions import incompatibility
from agent.ports.protocols import ModuleIndexer, Overlay, Runtimes

CHECK_TIMEOUT_S = 30.0  # and longer where much has to be read


@dataclass(frozen=True, slots=True)
class StageRuntime:
    """Inputs: `manifest`, `os_release` and `arch` of the board."""

    runtimes: Runtimes
    releases: Releases
    indexer: ModuleIndexer
    overlay: Overlay

    kind = "stage_runtime"
    commits = False
    volatile = False
    cancellable = True

    def prepare(self, inputs: Inputs) -> Memo:
        """Looks into the images that have just arrived: an incompatible one would be ignored without a word."""
        for image in inputs["manifest"]["extensions"]:
            for kind, keys in self.releases.of(image):
                why = incompatibility(keys, kind, inputs["os_release"], inputs["arch"])
                if why:
                    raise OperationError(
                        ErrorCode.INCOMPATIBLE,
                        f"cannot merge extension {image['name']} {image['version']}: systemd would ignore it: {why}",
                        "Build the extension for the operating system of this board.",
                    )
        return {"existed": inputs["manifest"]["id"] in self.runtimes.ids()}

    def do(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """runtimes/<id> is there as signed, with its links, and could be shown."""
        manifest = Manifest.model_validate(inputs["manifest"])
        folder = self.runtimes.stage(manifest, self.indexer.index(manifest.extensions))
        self.overlay.check(folder, CHECK_TIMEOUT_S)

    def undo(self, inputs: Inputs, memo: Memo, report: Report) -> None:
        """It is gone again, unless it was there before. An index stays, as images do; prune decides."""
        if not memo["existed"]:
            self.runtimes.remove(inputs["manifest"]["id"])

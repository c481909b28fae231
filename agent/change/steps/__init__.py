"""The steps, one file each: prepare, do and undo side by side. `build_handlers` is the registry the engine runs by."""

from __future__ import annotations

from collections.abc import Callable

from agent.change.confirmation import Confirmation
from agent.change.step import Step
from agent.change.steps.absence import Absence
from agent.change.steps.activate import Activate
from agent.change.steps.await_confirmation import AwaitConfirmation
from agent.change.steps.confirm_health import ConfirmHealth
from agent.change.steps.fetch_images import FetchImages
from agent.change.steps.prune import Prune
from agent.change.steps.release_npu import ReleaseNpu
from agent.change.steps.releases import AffectedUnits, Releases
from agent.change.steps.reload import Reload
from agent.change.steps.stage_runtime import StageRuntime
from agent.change.steps.start_services import StartServices
from agent.change.steps.stop_services import StopServices
from agent.change.steps.switch_overlay import SwitchOverlay
from agent.change.steps.warm_up import WarmUp
from agent.health import HealthPolicy
from agent.ports.protocols import (
    Clock,
    ImageReader,
    Inference,
    ModuleIndexer,
    Npu,
    Overlay,
    Rehearsal,
    Runtimes,
    Source,
    Store,
    Units,
)


def build_handlers(
    *,
    units: Units,
    overlay: Overlay,
    npu: Npu,
    inference: Inference,
    store: Store,
    runtimes: Runtimes,
    images: ImageReader,
    indexer: ModuleIndexer,
    rehearsal: Rehearsal,
    source_for: Callable[[str], Source],
    clock: Clock,
    confirmation: Confirmation,
    reach: Callable[[str], bool],
    policy: HealthPolicy | None = None,
) -> dict[str, Step]:
    """Every handler by its kind. `source_for` answers with the source that the daemon has open for this change.

    `reach`: whether a server answers over a new connection.
    """
    releases = Releases(store, images)
    affected = AffectedUnits(units, releases)
    absence = Absence(clock)
    steps: tuple[Step, ...] = (
        FetchImages(store, source_for),
        StageRuntime(runtimes, releases, indexer, overlay),
        WarmUp(rehearsal, runtimes, affected, clock),
        StopServices(units, affected, releases, absence),
        ReleaseNpu(npu, affected, clock),
        SwitchOverlay(overlay, runtimes),
        Reload(units, releases),
        StartServices(units, affected),
        ConfirmHealth(units, affected, inference, clock, absence, policy or HealthPolicy()),
        AwaitConfirmation(confirmation, reach, clock),
        Activate(runtimes, overlay),
        Prune(runtimes, store),
    )
    return {step.kind: step for step in steps}

"""What the service tells the supervisor to run: plain data, read from the accelerator profile once and sent as JSON.

The supervisor imports neither the profile's schema nor its library, so that it starts fast and stays small. What only
the worker needs goes through unread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference.deadlines import Limits
from inference.policy import Backend, Rules, Rung

if TYPE_CHECKING:
    from inference.accelerator import Accelerator, Share

# The standby has no other backend behind it: it gets long to answer, is retried soon and for ever, and is tested rarely
# because a test in its way would delay the very frame it stands by for.
_CPU_LIMITS = Limits(
    create_s=20.0,
    prepare_s=20.0,
    first_invoke_s=20.0,
    soft_ms_floor=250.0,
    soft_ms_ceiling=1000.0,
    soft_factor=5.0,
    hard_factor=4.0,
)
_CPU_GOLDEN_EVERY_S = 30.0
_CPU_BACKOFF_S = 0.1
_NEVER = _UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class LaneOrder:
    """What one lane runs, and its limits. `worker` is passed on to the worker."""

    backend: Backend
    rules: Rules
    limits: Limits
    golden_every_s: float
    reap_s: float
    fifo_priority: int
    worker: Mapping[str, Any]

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> LaneOrder:
        """The inverse of `dataclasses.asdict`."""
        known = {
            "backend": Backend(fields["backend"]),
            "rules": _rules(fields["rules"]),
            "limits": Limits(**fields["limits"]),
        }
        return cls(**{**fields, **known})


@dataclass(frozen=True, slots=True)
class Orders:
    """Everything the supervisor is told."""

    lanes: tuple[LaneOrder, ...]
    fifo_priority: int
    answer_timeout_s: float
    reset_request: str = ""
    reset_answer: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Orders:
        """The inverse of `as_dict`."""
        lanes = tuple(LaneOrder.parse(lane) for lane in fields["lanes"])
        return cls(**{**fields, "lanes": lanes})


def _rules(fields: Mapping[str, Any]) -> Rules:
    ladder = tuple((Rung(rung), limit) for rung, limit in fields["ladder"])
    return Rules(**{**fields, "ladder": ladder})


@dataclass(frozen=True, slots=True)
class Places:
    """Where the supervisor and its workers keep things: compiled graphs, and what is asked of root."""

    cache_dir: Path
    reset_request: Path
    reset_answer: Path


def orders_for(
    accelerator: Accelerator,
    model_dir: Path,
    places: Places,
    *,
    only: Backend | None = None,
    answer_timeout_s: float = 10.0,
) -> Orders:
    """The lanes of a board: its NPU where it has one, and always the CPU; or `only` one of them."""
    lanes = []
    if accelerator.delegate is not None and only is not Backend.CPU:
        lanes.append(_npu_lane(accelerator, model_dir, places.cache_dir))
    if only is not Backend.NPU:
        lanes.append(_cpu_lane(accelerator, model_dir))
    return Orders(
        tuple(lanes),
        accelerator.resources.supervisor.fifo_priority,
        answer_timeout_s,
        reset_request=str(places.reset_request),
        reset_answer=str(places.reset_answer),
    )


def _npu_lane(accelerator: Accelerator, model_dir: Path, cache_dir: Path) -> LaneOrder:
    recovery = accelerator.recovery
    share = accelerator.resources.npu
    order = {
        "accelerator": accelerator.name,
        "delegate": accelerator.delegate.model_dump(include={"path", "options"}) if accelerator.delegate else None,
        "operators": list(accelerator.delegate.operators) if accelerator.delegate else [],
        "nodes": list(accelerator.nodes),
        "env": dict(accelerator.env),
        "modules": list(accelerator.modules),
        "pairing": {what: one.model_dump(mode="json") for what, one in accelerator.pairing.items()},
        "cache_dir": str(cache_dir),
    }
    rules = Rules(
        golden_passes=recovery.golden_passes,
        slow_limit=recovery.slow_limit,
        backoff_s=recovery.backoff_s,
        backoff_max_s=recovery.backoff_max_s,
        give_up_after=accelerator.reset.limit(Rung.NEW_WORKER, recovery.give_up_after),
        healthy_s=recovery.healthy_s,
        settle_s=accelerator.settle_s,
        contexts=accelerator.contexts,
        ladder=tuple((rung, accelerator.reset.limit(rung, 1)) for rung in accelerator.reset.beyond_workers()),
        reset_s=accelerator.reset.patience_s,
        quarantine_s=accelerator.reset.quarantine_s,
        idle_close_s=recovery.idle_close_s,
    )
    return LaneOrder(
        backend=Backend.NPU,
        rules=rules,
        limits=Limits(**accelerator.deadlines.model_dump()),
        golden_every_s=recovery.golden_every_s,
        reap_s=recovery.reap_s,
        fifo_priority=share.fifo_priority,
        worker={**order, **_worker_share(share, model_dir)},
    )


def _cpu_lane(accelerator: Accelerator, model_dir: Path) -> LaneOrder:
    share = accelerator.resources.cpu
    order: dict[str, Any] = {"accelerator": "cpu", "delegate": None, "operators": [], "nodes": [], "pairing": {}}
    return LaneOrder(
        backend=Backend.CPU,
        # Contexts: nothing is held exclusively, so a stuck CPU worker never keeps the next one from starting.
        rules=Rules(
            golden_passes=1, backoff_s=_CPU_BACKOFF_S, backoff_max_s=10.0, give_up_after=_NEVER, contexts=_UNLIMITED
        ),
        limits=_CPU_LIMITS,
        golden_every_s=_CPU_GOLDEN_EVERY_S,
        reap_s=accelerator.recovery.reap_s,
        fifo_priority=share.fifo_priority,
        worker={**order, **_worker_share(share, model_dir)},
    )


def _worker_share(share: Share, model_dir: Path) -> dict[str, Any]:
    return {
        "model_dir": str(model_dir),
        "threads": share.threads,
        "nice": share.nice,
        "cpus": list(share.cpus),
        "memory_bytes": share.memory_bytes,
    }

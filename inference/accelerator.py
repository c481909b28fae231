"""Accelerator profiles: what this board's NPU is, as data a stranger can write in ten lines of TOML.

A profile names the delegate, its device nodes, how long each stage may take, how to bring the device back and what each
backend may use of the machine. Unknown keys are refused, so that a misspelt deadline is an error and not a default.
Shipped profiles are named after boards; a board's own lies in /usr/share/avocado/accelerator.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from inference.errors import InferenceError
from inference.pairing import ALWAYS, Rule
from inference.policy import Rung

Seconds = Annotated[float, Field(gt=0, le=3600)]
Pause = Annotated[float, Field(ge=0, le=3600)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Delegate(_Table):
    """An external TFLite delegate: the library and its options, which are strings by its interface.

    `operators` names the custom operators that a model compiled for it contains and that only it can run.
    """

    path: str
    options: dict[str, str] = Field(default_factory=dict)
    operators: tuple[str, ...] = ()


class Pairing(_Table):
    """How near this board's version of something must be to what a model file was made for, and where it is found.

    One of `text` (it stands here), `file` (its first line), `module` (a kernel module's version) and `symbol` (a
    function of the delegate's library that returns text).
    """

    rule: Rule
    text: str = ""
    file: str = ""
    module: str = ""
    symbol: str = ""

    @model_validator(mode="after")
    def _one_source(self) -> Pairing:
        if sum(map(bool, (self.text, self.file, self.module, self.symbol))) != 1:
            raise ValueError("a pairing needs exactly one of text, file, module and symbol")
        return self


class Deadlines(_Table):
    """How long each stage may take. Steady state is learned: p99 times `soft_factor`, between floor and ceiling."""

    create_s: Seconds = 20.0
    prepare_s: Seconds = 30.0
    first_invoke_s: Seconds = 60.0
    soft_ms_floor: Annotated[float, Field(gt=0)] = 20.0
    soft_ms_ceiling: Annotated[float, Field(gt=0)] = 250.0
    soft_factor: Annotated[float, Field(ge=1)] = 3.0
    hard_factor: Annotated[float, Field(ge=4)] = 4.0

    @model_validator(mode="after")
    def _ordered(self) -> Deadlines:
        if self.soft_ms_ceiling < self.soft_ms_floor:
            raise ValueError("soft_ms_ceiling must not be below soft_ms_floor")
        return self


class Recovery(_Table):
    """How a failed NPU comes back; the fields of `inference.policy.Rules` and the golden frame's rhythm."""

    golden_passes: Annotated[int, Field(ge=1)] = 3
    golden_every_s: Seconds = 5.0
    slow_limit: Annotated[int, Field(ge=1)] = 5
    backoff_s: Pause = 0.5
    backoff_max_s: Pause = 60.0
    give_up_after: Annotated[int, Field(ge=1)] = 8
    healthy_s: Seconds = 10.0
    reap_s: Seconds = 2.0
    idle_close_s: Pause = 0.0


class Reset(_Table):
    """The rungs tried in order as failures add up, and how often each may be used in one row of failures.

    `device` is the sysfs folder of the device that `rebind` takes from its driver and gives back; without it, the
    device behind the first of `nodes`. The limit of `reboot` holds across reboots.
    """

    ladder: tuple[Rung, ...] = (Rung.NEW_WORKER,)
    limits: dict[Rung, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    device: Annotated[str, Field(pattern=r"^(/sys/.+)?$")] = ""
    patience_s: Seconds = 30.0
    quarantine_s: Seconds = 30.0

    @model_validator(mode="after")
    def _mild_first(self) -> Reset:
        if not self.ladder or self.ladder[0] is not Rung.NEW_WORKER:
            raise ValueError("the ladder must begin with new_worker")
        order = [list(Rung).index(rung) for rung in self.ladder]
        if order != sorted(set(order)):
            raise ValueError("the ladder must name each rung once, from mild to harsh: " + ", ".join(Rung))
        if unused := set(self.limits) - set(self.ladder):
            raise ValueError(f"limits names {', '.join(sorted(unused))}, which the ladder does not have")
        return self

    def limit(self, rung: Rung, default: int) -> int:
        """How often a rung may be used."""
        return self.limits.get(rung, default)

    def beyond_workers(self) -> tuple[Rung, ...]:
        """The rungs that need root."""
        return self.ladder[1:]


class Share(_Table):
    """What one backend may use of the machine. `fifo_priority` 0 leaves it at normal scheduling."""

    threads: Annotated[int, Field(ge=1, le=64)] = 1
    nice: Annotated[int, Field(ge=-20, le=19)] = 0
    cpus: tuple[int, ...] = ()
    fifo_priority: Annotated[int, Field(ge=0, le=50)] = 0
    memory_bytes: Annotated[int, Field(ge=0)] = 0


class Resources(_Table):
    """Shares per backend; the standby runs above normal priority, because priority decides the fallback's latency."""

    npu: Share = Share()
    cpu: Share = Share(fifo_priority=10)
    supervisor: Share = Share(fifo_priority=10)


class Accelerator(_Table):
    """One board's accelerator; kind `cpu` means that there is no NPU."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]
    kind: Literal["npu", "cpu"]
    summary: str = ""
    delegate: Delegate | None = None
    nodes: tuple[str, ...] = ()
    contexts: Annotated[int, Field(ge=1)] = 1
    settle_s: Pause = 0.0
    modules: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    deadlines: Deadlines = Deadlines()
    recovery: Recovery = Recovery()
    reset: Reset = Reset()
    pairing: dict[str, Pairing] = Field(default_factory=dict)
    resources: Resources = Resources()

    @model_validator(mode="after")
    def _delegate_where_npu(self) -> Accelerator:
        if (self.kind == "npu") != (self.delegate is not None):
            raise ValueError("a profile of kind npu needs a [delegate], and one of kind cpu has none")
        if known := self.pairing.keys() & ALWAYS.keys():
            raise ValueError(f"pairing: {', '.join(sorted(known))} is checked on every board")
        return self


def shipped() -> tuple[str, ...]:
    """Names of the profiles in this package."""
    folder = resources.files("inference") / "accelerators"
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load_accelerator(profile: str | Path, overrides: Mapping[str, Any] | None = None) -> Accelerator:
    """The profile at a path, or the shipped one of that name; `overrides` replaces nested keys before validation."""
    if isinstance(profile, str) and profile in shipped():
        source = f"profile {profile}"
        text = (resources.files("inference") / "accelerators" / f"{profile}.toml").read_text()
    else:
        source = str(profile)
        try:
            text = Path(profile).read_text()
        except OSError as error:
            raise InferenceError(
                f"cannot read accelerator profile {source}: {error.strerror}",
                f"name a file or one of: {', '.join(shipped())}",
            ) from error
    try:
        return Accelerator.model_validate(_merged(tomllib.loads(text), overrides or {}))
    except tomllib.TOMLDecodeError as error:
        raise InferenceError(f"cannot read accelerator profile {source}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise InferenceError(f"cannot use accelerator profile {source}: {where}: {first['msg']}") from error


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        inner = result.get(key)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            result[key] = _merged(inner, value)
        else:
            result[key] = value
    return result

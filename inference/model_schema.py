"""The schema of model.json, version 1: what a prepared model folder says about itself.

A pose model is what the pose service runs; any other vision model has the same document with another output contract,
for the program that knows what its outputs mean.

Strict: a number is not a string, a path is a plain file name, a pose has 17 finite rows. Keys this version does not
know are ignored, so that a newer `prepare` may add some; a newer schema number is refused by `inference.model` before
this module sees the document. Described for people in docs/formats.md.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

SCHEMA = 1
_COMPILERS = frozenset({"ethos-u-vela", "neutron-converter"})

FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=120)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
NAME_LENGTH = VERSION_LENGTH = 60
VERSION_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=NAME_LENGTH)]
Row = tuple[FiniteFloat, FiniteFloat, FiniteFloat]
Pose = Annotated[tuple[Row, ...], Field(min_length=17, max_length=17)]
Version = Annotated[str, Field(pattern=r"^[ -~]+$", max_length=120)]
Fraction = Annotated[FiniteFloat, Field(ge=0, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class InputContract(_Part):
    """The one input tensor, by its signature name."""

    name: str
    shape: tuple[Literal[1], Annotated[int, Field(ge=1, le=4096)], Annotated[int, Field(ge=1, le=4096)], Literal[3]]
    dtype: Literal["uint8"]


class HeadNames(_Part):
    """Signature names of MoveNet's heads; outputs are bound by name, never by position."""

    center: str
    regress: str
    heatmap: str
    offset: str


class OutputContract(_Part):
    """What the outputs mean and the constant map their decode needs."""

    kind: Literal["movenet-heads"]
    names: HeadNames
    centre_weight: FileName


class ModelFile(_Part):
    """What one accelerator loads, who made it, and what it was made for."""

    path: FileName
    sha256: Sha256
    recipe: str
    toolchain: dict[str, Version]
    pairing: dict[str, Version] = Field(default_factory=dict)


class Golden(_Part):
    """A picture nobody calibrated on, the pose each accelerator gave for it, and how near is near enough."""

    frame: FileName
    poses: dict[str, Pose]
    oks_min: dict[str, Fraction]


class AcceleratorRequirements(_Part):
    """What holds on one accelerator only."""

    latency_p95_ms: Annotated[FiniteFloat, Field(gt=0)] | None = None
    max_cpu_ops: Annotated[int, Field(ge=0)] | None = None
    max_partitions: Annotated[int, Field(ge=0)] | None = None


class Requirements(_Part):
    """What the board must achieve, fixed before anything was measured."""

    backend: Literal["npu", "any"]
    latency_p95_ms: Annotated[FiniteFloat, Field(gt=0)]
    frame_rate_fps: Annotated[FiniteFloat, Field(gt=0)]
    accuracy: dict[str, FiniteFloat] = Field(default_factory=dict)
    accelerators: dict[Name, AcceleratorRequirements] = Field(default_factory=dict)


class OtherOutput(_Part):
    """Outputs of a model that is not a pose model: class scores, or tensors bound by name."""

    kind: Literal["scores", "tensors"]
    names: Annotated[dict[str, str], Field(min_length=1)]


class OtherGolden(_Part):
    """The golden frame, and the start of each accelerator's answer to it."""

    frame: FileName
    answers: dict[str, tuple[tuple[float, float], ...]]


class _Document(_Part):
    """What every model.json holds."""

    schema_number: Literal[1] = Field(alias="schema")
    name: Name
    version: Annotated[str, Field(pattern=VERSION_PATTERN, max_length=VERSION_LENGTH)]
    input: InputContract
    files: Annotated[dict[Name, ModelFile], Field(min_length=1)]
    digests: dict[FileName, Sha256]
    calibration: dict[str, Any]
    accuracy: dict[str, Any]
    placement: dict[str, Any]
    requirements: Requirements

    @model_validator(mode="after")
    def _has_a_fallback(self) -> Self:
        if "cpu" not in self.files:
            raise ValueError("files has no entry for the cpu, which every model needs as its fallback")
        compiled = {file.path: tool for file in self.files.values() for tool in _COMPILERS & file.toolchain.keys()}
        if self.files["cpu"].path in compiled:
            raise ValueError(f"files.cpu was made by {compiled[self.files['cpu'].path]}: no CPU runs it")
        return self


class ModelDocument(_Document):
    """One model.json of a pose model."""

    task: Literal["pose"]
    output: OutputContract
    golden: Golden

    @model_validator(mode="after")
    def _belongs_together(self) -> ModelDocument:
        for name in self.files:
            if name not in self.golden.poses or name not in self.golden.oks_min:
                raise ValueError(f"golden has no pose or no oks_min for {name}")
        for path in (self.golden.frame, self.output.centre_weight):
            if path not in self.digests:
                raise ValueError(f"digests has no sha256 for {path}")
        return self


class OtherDocument(_Document):
    """One model.json of any other vision model."""

    task: Literal["classification", "tensors"]
    output: OtherOutput
    golden: OtherGolden

    @model_validator(mode="after")
    def _belongs_together(self) -> OtherDocument:
        for name in self.files:
            if name not in self.golden.answers:
                raise ValueError(f"golden has no answer for {name}")
        if self.golden.frame not in self.digests:
            raise ValueError(f"digests has no sha256 for {self.golden.frame}")
        return self

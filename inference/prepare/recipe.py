"""What each accelerator is given, as data, and the steps that make its INT8 file.

A recipe names how a file is made, which boards load it and what they must achieve. A target without one is refused by
name: better no file than one that the board's NPU runs wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from inference.errors import InferenceError
from inference.prepare.bias import correct_biases
from inference.prepare.calibrate import Pictures
from inference.prepare.equalise import activity, equalise
from inference.prepare.graph import Net
from inference.prepare.quantize import round_all, write_int8
from inference.prepare.ranges import VARIANTS, Variant, choose_ranges
from inference.prepare.rounding import round_together, second_moments
from inference.prepare.writer import write_float


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one accelerator's file is made, and what a board with it must achieve.

    `careful` adds what one scale a tensor cannot do without and one a channel gains a little from: equalised layers,
    weights rounded together, corrected biases. It takes half a minute more. `vela` and `neutron` name the configuration
    to compile for. `limits` are requirements on the placement, checked where it is known.
    """

    name: str
    per_channel: bool
    careful: bool
    latency_p95_ms: float
    boards: tuple[str, ...] = ()
    vela: str = ""
    neutron: str = ""
    limits: Mapping[str, int] = field(default_factory=dict)

    def with_one_scale_per_tensor(self) -> Recipe:
        """The same for an NPU that wants one scale a tensor, as the i.MX 8M Plus does."""
        if not self.per_channel:
            return self
        return replace(self, name=f"{self.name}-per-tensor", per_channel=False, careful=True)


CPU = "cpu"
FRAME_RATE_FPS = 30.0
_WHOLE = {"max_cpu_ops": 0, "max_partitions": 1}
RECIPES = {
    CPU: Recipe("cpu-xnnpack", True, False, 100.0),
    "virtual": Recipe("virtual", True, False, 100.0, boards=("virtual",)),
    # With one scale a channel this NPU is slow where it is right.
    "imx8mp-vx": Recipe(
        "imx8mp-vx",
        False,
        True,
        33.0,
        boards=("imx8mp-evk", "imx8mp-frdm", "imx8mp-var-dart", "ucm-imx8m-plus"),
    ),
    "imx93-ethosu": Recipe(
        "imx93-ethosu", True, False, 33.0, boards=("imx93-frdm",), vela="ethos-u65-256", limits=_WHOLE
    ),
    "imx95-neutron": Recipe("imx95-neutron", True, False, 33.0, boards=("imx95-frdm",), neutron="imx95"),
}

Check = Callable[[str, bytes], None]
"""Judges a file after a step of this name; it raises when the step broke the model."""


def accelerator_for(target: str) -> str:
    """The accelerator of a board, or the accelerator of that name; InferenceError for neither."""
    if target in RECIPES:
        return target
    for name, recipe in RECIPES.items():
        if target in recipe.boards:
            return name
    boards = sorted(board for recipe in RECIPES.values() for board in recipe.boards)
    raise InferenceError(
        f"cannot prepare for {target}: there are recipes for the boards {', '.join(boards)} "
        f"and the accelerators {', '.join(sorted(RECIPES))}",
        "name one of them with --target",
    )


def quantize(net: Net, pictures: Pictures, recipe: Recipe, variant: Variant, check: Check) -> bytes:
    """The network's INT8 file by a recipe; `check` sees what each step left."""
    if not recipe.careful:
        ranges = choose_ranges(net, pictures, variant)
        return write_int8(net, ranges, codes=round_all(net, per_channel=recipe.per_channel))
    if not recipe.per_channel:
        net = equalise(net, activity(net, pictures))
        check("equalised", write_float(net))
    ranges = choose_ranges(net, pictures, variant)
    codes = round_together(net, second_moments(net, pictures), per_channel=recipe.per_channel)
    return write_int8(net, ranges, codes=codes, biases=correct_biases(net, pictures, ranges, codes))


__all__ = ["CPU", "FRAME_RATE_FPS", "RECIPES", "VARIANTS", "Recipe", "accelerator_for", "quantize"]

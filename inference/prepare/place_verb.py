"""`avocado-infer place`: which operators of any INT8 .tflite an NPU takes, before anything is prepared or deployed.

For an Ethos-U and a Neutron NPU the answer is the compiler's, for others the delegate's own, where it is installed. The
file is only read, so the whole graph of somebody else's model can be asked about too.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from inference.errors import InferenceError
from inference.measure.placement import Placement

DESCRIPTION = """\
Show what a board's NPU takes of an INT8 .tflite, in how many pieces, and why the rest stays on the CPU.

  avocado-infer place model_int8.tflite --target imx93-frdm
  avocado-infer place model_int8.tflite --target imx93-frdm --max-cpu-ops 0 --max-partitions 1   as a gate: status 1

Percentages mislead: 13 % of the operators on the CPU can mean 13 trips there and back. Look at the pieces.
"""


def register(subparsers: Any) -> None:
    """Add the verb's parser."""
    parser = subparsers.add_parser(
        "place",
        help="which operators of a .tflite an NPU takes",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--target", required=True, metavar="NAME", help="a board or an accelerator")
    parser.add_argument("--max-cpu-ops", type=int, metavar="N", help="refuse more operators on the CPU")
    parser.add_argument("--max-partitions", type=int, metavar="N", help="refuse more pieces")
    parser.add_argument("--delegate", type=Path, metavar="FILE", help="the accelerator's library on this machine")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")


def run(arguments: argparse.Namespace) -> int:
    """Print the placement; 1 when it breaks a limit."""
    from inference.prepare.recipe import accelerator_for

    accelerator = accelerator_for(arguments.target)
    placement = placement_on(accelerator, arguments.model, arguments.delegate)
    if arguments.output == "json":
        print(json.dumps(placement.as_dict(), indent=1))
    else:
        print(f"{arguments.model.name} on {accelerator}: {placement.counts()}: {placement.summary()}")
        for name, reason in placement.reasons.items():
            print(f"  {name} stays on the CPU: {reason}")
    limits = {"max_cpu_ops": arguments.max_cpu_ops, "max_partitions": arguments.max_partitions}
    excess = placement.excess({key: limit for key, limit in limits.items() if limit is not None})
    if excess:
        print(f"avocado-infer: {arguments.model.name} on {accelerator}: {excess}", file=sys.stderr)
    return 1 if excess else 0


def placement_on(accelerator: str, model: Path, delegate: Path | None) -> Placement:
    """What the accelerator takes of a file."""
    from inference.measure.placement import place
    from inference.prepare.neutron import convert_for
    from inference.prepare.pipeline import find_delegate
    from inference.prepare.recipe import RECIPES
    from inference.prepare.tflite import read_file
    from inference.prepare.vela import compile_for

    content = read_file(model)
    recipe = RECIPES[accelerator]
    if recipe.vela:
        return compile_for(content, recipe.vela).placement
    if recipe.neutron:
        return convert_for(content, recipe.neutron).placement
    library = find_delegate(accelerator, delegate)
    if library is None:
        raise InferenceError(
            f"cannot place {model} on {accelerator}: its delegate is not on this machine",
            "run this on the board, or name its library with --delegate",
        )
    return place(model, library)

"""`avocado-infer prepare`: a float model becomes the folder that boards load.

Read, cut at the heads, write float, learn ranges, write int8, judge against float on held-out pictures, pick the golden
frame, see what the accelerator takes, write model.json. Every step prints one line; the same input gives the same
bytes.
"""

from __future__ import annotations

import argparse
import math
import resource
import sys
import time
from pathlib import Path
from typing import Any

from inference.errors import InferenceError

DESCRIPTION = """\
Turn a float model into INT8 for the boards that are named and for the CPU, and measure what that cost.

MODEL is a float32 .tflite of any vision model with one RGB picture as its input, or MoveNet's TensorFlow.js graph
(movenet-lightning.json with its .bin beside it), as `avocado-infer fetch` leaves it. The folder written to --out holds
model.json, one file per accelerator, always one for the CPU, and the golden frame.

Calibration pictures decide the ranges: 20 to 50 of what the camera will see. Held-out pictures judge the result and are
never calibrated on. --target may be repeated: one folder then serves several boards.

  avocado-infer prepare build/assets/movenet-lightning.json --target imx93-frdm --target imx8mp-evk
  avocado-infer prepare classes.tflite --target imx8mp-evk --input-range=-1,1 --calibration pictures \\
      --heldout others --require min_top1_agreement=0.9

Two variants make two honest versions of the same MoveNet:
"""


def register(subparsers: Any) -> None:
    """Add the verb's parser."""
    from inference.prepare.document import REQUIREMENTS
    from inference.prepare.recipe import RECIPES, VARIANTS

    variants = "\n".join(f"  {name:12} {entry.summary} (version {entry.version})" for name, entry in VARIANTS.items())
    boards = "\n".join(f"  {name:14} {', '.join(one.boards) or 'any board'}" for name, one in sorted(RECIPES.items()))
    parser = subparsers.add_parser(
        "prepare",
        help="float model -> INT8 -> the folder that boards load",
        description=f"{DESCRIPTION}{variants}\n\nAccelerators, and the boards that have them:\n{boards}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument(
        "--target", required=True, action="append", metavar="NAME", help="a board or an accelerator; may be repeated"
    )
    parser.add_argument("--calibration", type=Path, metavar="DIR", help="default: calibration/ beside MODEL")
    parser.add_argument("--heldout", type=Path, metavar="DIR", help="default: heldout/ beside the calibration folder")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: build/models/<name of MODEL>")
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="percentile")
    parser.add_argument(
        "--version", default="", metavar="VERSION", help="of the model (default: 1.0; of MoveNet the variant's)"
    )
    parser.add_argument(
        "--input-range",
        metavar="LOW,HIGH",
        help="what the float input expects for black and white, such as --input-range=-1,1",
    )
    parser.add_argument(
        "--dequantize", action="store_true", help="take an already quantized file's values as the float model"
    )
    parser.add_argument(
        "--per-tensor",
        action="store_true",
        help="one scale per tensor on every accelerator, as the i.MX 8M Plus is given; half a minute of CPU more",
    )
    parser.add_argument(
        "--require",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"a requirement instead of the recipe's; keys: {', '.join(REQUIREMENTS)}",
    )
    parser.add_argument(
        "--delegate",
        type=Path,
        metavar="FILE",
        help="the accelerator's library on this machine, for its golden pose (default for virtual: the one built here)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Do it; 0 when the folder is complete and the model passed."""
    from inference.prepare.document import parse_requirement
    from inference.prepare.pipeline import Job, prepare_model
    from inference.prepare.recipe import accelerator_for

    started = time.monotonic()
    calibration = arguments.calibration or arguments.model.parent / "calibration"
    job = Job(
        source=arguments.model,
        targets=tuple(dict.fromkeys(accelerator_for(name) for name in arguments.target)),
        calibration=calibration,
        held_out=arguments.heldout or calibration.parent / "heldout",
        out=arguments.out or Path("build/models") / arguments.model.stem,
        variant=arguments.variant,
        version=arguments.version,
        delegate=arguments.delegate,
        input_range=_input_range(arguments.input_range),
        dequantize=arguments.dequantize,
        per_tensor=arguments.per_tensor,
        asked=dict(parse_requirement(text) for text in arguments.require),
    )
    prepare_model(job, _say)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    _say(f"took {time.monotonic() - started:.0f} s ({time.process_time():.0f} s of CPU), at most {peak_mib:.0f} MiB")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _input_range(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError as error:
        raise InferenceError(f"cannot use the input range {text!r}: it is not LOW,HIGH", "such as -1,1") from error
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise InferenceError(f"cannot use the input range {text!r}: LOW is not below HIGH", "such as -1,1")
    return low, high

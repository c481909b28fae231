"""`avocado-infer prepare`: a float model becomes the folder that a board loads.

Read, cut at the heads, write float, learn ranges, write int8, judge against float on held-out pictures, pick the golden
frame, see what the accelerator takes, write model.json. Every step prints one line; the same input gives the same
bytes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Turn a float model into INT8 for one accelerator and for the CPU, and measure what that cost.

MODEL is MoveNet's TensorFlow.js graph (movenet-lightning.json with its .bin beside it), as `avocado-infer fetch` leaves
it. The folder written to --out holds model.json, one .tflite per accelerator, the golden frame and the centre weights.

Calibration pictures decide the ranges: 20 to 50 of what the camera will see. Held-out pictures judge the result and are
never calibrated on. Two variants make two honest versions of the same model:
"""


def register(subparsers: Any) -> None:
    """Add the verb's parser."""
    from inference.prepare.recipe import RECIPES, VARIANTS

    variants = "\n".join(f"  {name:12} {entry.summary} (version {entry.version})" for name, entry in VARIANTS.items())
    parser = subparsers.add_parser(
        "prepare",
        help="float model -> INT8 -> the folder that one board loads",
        description=DESCRIPTION + variants,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--target", required=True, metavar="NAME", help=f"one of: {', '.join(sorted(RECIPES))}")
    parser.add_argument("--calibration", type=Path, metavar="DIR", help="default: calibration/ beside MODEL")
    parser.add_argument("--heldout", type=Path, metavar="DIR", help="default: heldout/ beside the calibration folder")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: build/models/<name of MODEL>")
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="percentile")
    parser.add_argument(
        "--delegate",
        type=Path,
        metavar="FILE",
        help="the accelerator's library on this machine, for its golden pose (default for virtual: the one built here)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Do it; 0 when the folder is complete and the model passed."""
    from inference.prepare.movenet import Job, prepare_movenet

    calibration = arguments.calibration or arguments.model.parent / "calibration"
    job = Job(
        source=arguments.model,
        target=arguments.target,
        calibration=calibration,
        held_out=arguments.heldout or calibration.parent / "heldout",
        out=arguments.out or Path("build/models") / arguments.model.stem,
        variant=arguments.variant,
        delegate=arguments.delegate,
    )
    prepare_movenet(job, lambda line: print(line, file=sys.stderr, flush=True))
    return 0

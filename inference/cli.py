"""avocado-infer: one verb per job of the pose service's side, each in a module of its own.

A verb's module offers `register(subparsers)`, which adds its parser, and `run(arguments) -> int`, which does the job
and returns the exit status. Only the module of the verb that was typed is imported, so that `--help` answers at once
and the device needs none of what only `prepare` loads. An `InferenceError` becomes two lines on stderr and status 1.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from inference.errors import InferenceError


class Verb(NamedTuple):
    """One row of the table below."""

    module: str
    summary: str


VERBS = {
    "serve": Verb("inference.service", "run the pose service: camera, supervised inference, web page, D-Bus"),
    "try": Verb("inference.tryout", "run one model folder once on its golden frame, without the service"),
    "doctor": Verb("inference.measure.doctor", "look at everything the pose service needs on this board"),
    "inject": Verb("inference.inject", "make the simulated NPU misbehave: hang, slow, error, wrong, crash"),
    "reset": Verb("inference.rungs", "carry out a requested rung of the reset ladder (run by pose-reset.service)"),
    "fetch": Verb("inference.prepare.fetch", "download the example's weights and video, pinned by hash and cached"),
    "prepare": Verb("inference.prepare.verb", "float model -> INT8 -> the folder that boards load"),
    "place": Verb("inference.prepare.place_verb", "which operators of a .tflite an NPU takes"),
}

EXAMPLES = """\
from nothing to a model folder:
  avocado-infer fetch --out build/assets
  avocado-infer prepare build/assets/movenet-lightning.json --target virtual \\
      --calibration build/assets/calibration --out build/models/movenet-lightning
  avocado-infer try --model build/models/movenet-lightning

`avocado-infer VERB --help` explains each verb."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb named on the command line and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    typed = next((word for word in words if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="avocado-infer",
        description="Prepare, try and serve a model on a board's NPU.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    module = None
    for name, verb in VERBS.items():
        if name == typed:
            module = importlib.import_module(verb.module)
            module.register(subparsers)
        else:
            subparsers.add_parser(name, help=verb.summary)
    arguments = parser.parse_args(words)
    if module is None:
        raise AssertionError("argparse accepted a verb that is not in the table")
    try:
        status: int = module.run(arguments)
    except InferenceError as error:
        print(f"avocado-infer: {error.message}", file=sys.stderr)
        if error.remedy:
            print(f"  try: {error.remedy}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())

"""avocado-infer try: one model folder, once, in workers of its own, without the service.

Loads the model on the board's accelerator (or the CPU), with the same processes and deadlines as the service, runs the
golden frame and says how near the pose came and how long it took: what a change wants to know before it switches. The
NPU must be free, or grant a second context; where it is not, the answer is `busy` and the exit status 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from inference.accelerator import load_accelerator
from inference.errors import InferenceError
from inference.link import SupervisorLink, SupervisorSettings
from inference.policy import Backend, Phase

BOARD_PROFILE = Path("/usr/share/avocado/accelerator.toml")
_ROUNDS = 20

DESCRIPTION = """\
Load one model folder in a worker of its own, on the board's accelerator or the CPU, and run its golden frame 21 times:
how near the pose came, how long the first and the later inferences took, or what went wrong and what to do about it.
The NPU must be free, or grant another context; otherwise the reason is `busy`.

  avocado-infer try --model /usr/share/avocado/model
  avocado-infer try --model DIR --profile myboard.toml -o json

Exit status: 0 the golden frame passed every time; 1 it did not, or could not be run; 2 the command line is wrong."""


def register(subparsers: Any) -> None:
    """Add the verb's parser."""
    parser = subparsers.add_parser(
        "try",
        help="run one model folder once on its golden frame, without the service",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the model folder")
    parser.add_argument("--profile", default=None, help=f"accelerator profile or its file (default: {BOARD_PROFILE})")
    parser.add_argument("--backend", choices=["npu", "cpu"], default=None, help="default: the NPU where there is one")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")


def run(arguments: argparse.Namespace) -> int:
    """0 when the golden frame passed; 1 when it did not, or could not be run."""
    profile = arguments.profile or (str(BOARD_PROFILE) if BOARD_PROFILE.exists() else "cpu")
    accelerator = load_accelerator(profile)
    backend = Backend(arguments.backend) if arguments.backend else Backend(accelerator.kind)
    with tempfile.TemporaryDirectory(prefix="avocado-try-") as run_dir:
        settings = SupervisorSettings(arguments.model, profile, Path(run_dir), only=backend)
        result = {"accelerator": accelerator.name, **asyncio.run(_try(settings, backend))}
    if arguments.output == "json":
        json.dump(result, sys.stdout)
        print()
    else:
        shown = {key: value for key, value in result.items() if value not in (None, "")}
        print("\n".join(f"{key:18} {value}" for key, value in shown.items()))
    return 0 if result["passed"] else 1


async def _try(settings: SupervisorSettings, backend: Backend) -> dict[str, Any]:
    link = await SupervisorLink.start(settings)
    try:
        message, remedy = await _first_verdict(link, backend)
        tests = [] if message else [await link.self_test() for _ in range(_ROUNDS)]
        lane = link.state.backends[backend]
        first_ms = lane["first_invoke_ms"]
        latencies = sorted(test.latency_ms for test in tests)
        return {
            "passed": bool(tests) and all(test.passed for test in tests),
            "backend": backend,
            "reason": tests[-1].reason if tests else lane["reason"],
            "oks": min((test.oks for test in tests), default=lane["oks"]),
            "first_invoke_ms": first_ms and round(first_ms, 3),
            "latency_p50_ms": round(statistics.median(latencies), 3) if latencies else None,
            "latency_p95_ms": round(latencies[round(0.95 * (_ROUNDS - 1))], 3) if latencies else None,
            "model": link.state.model.get("model", ""),
            "version": link.state.model.get("version", ""),
            "runtime": link.state.model.get("runtime", ""),
            "message": message,
            "remedy": remedy,
        }
    finally:
        await link.close()


async def _first_verdict(link: SupervisorLink, backend: Backend) -> tuple[str, str]:
    """Empty once the backend serves; or what its first worker died of, since a trial is not retried."""
    while True:
        state = link.state
        lane = state.backends[backend]
        if state.backend is backend:
            return "", ""
        if lane["failures"] or lane["phase"] == Phase.GAVE_UP:
            return lane["message"], lane["remedy"]
        if not link.alive:
            raise InferenceError("cannot try the model: the supervisor died")
        await link.next_state()

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
from inference.config import DEFAULT_PATH, read_config
from inference.errors import InferenceError
from inference.link import SupervisorLink, SupervisorSettings
from inference.model import load_model
from inference.policy import Backend, Phase

_ROUNDS = 20

DESCRIPTION = """\
Load one model folder, by default the one that pose.toml names, in a worker of its own, on the board's accelerator or
the CPU, and run its golden frame 21 times: how near the pose came, how long the first and the later inferences took, or
what went wrong and what to do about it. The NPU must be free, or grant another context; otherwise the reason is `busy`.

  avocado-infer try
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
    parser.add_argument("--model", type=Path, metavar="DIR", help="the model folder (default: pose.toml's)")
    parser.add_argument("--profile", help="accelerator profile or its file (default: pose.toml's; cpu without one)")
    parser.add_argument("--config", type=Path, help=f"pose.toml (default: {DEFAULT_PATH})")
    parser.add_argument("--backend", choices=["npu", "cpu"], default=None, help="default: the NPU where there is one")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")


def run(arguments: argparse.Namespace) -> int:
    """0 when the golden frame passed; 1 when it did not, or could not be run."""
    config = read_config(arguments.config)
    profile, model = arguments.profile, arguments.model or Path(config.model.folder)
    if profile is None:
        profile = config.accelerator.profile if Path(config.accelerator.profile).exists() else "cpu"
    accelerator = load_accelerator(profile)
    backend = Backend(arguments.backend) if arguments.backend else Backend(accelerator.kind)
    result = {"accelerator": accelerator.name, "required_backend": _required(model)}
    if (model / "model.json").exists():
        with tempfile.TemporaryDirectory(prefix="avocado-try-") as run_dir:
            settings = SupervisorSettings(model, profile, Path(run_dir), only=backend)
            result |= asyncio.run(_try(settings, backend))
    else:
        result |= _nothing(model, backend)
    if arguments.output == "json":
        json.dump(result, sys.stdout)
        print()
    else:
        shown = {key: value for key, value in result.items() if value not in (None, "")}
        print("\n".join(f"{key:18} {value}" for key, value in shown.items()))
    return 0 if result["passed"] else 1


def _required(model: Path) -> str:
    """What the model must run on; empty where that cannot be read, which the worker says better."""
    try:
        return load_model(model).requirements.backend
    except InferenceError:
        return ""


def _nothing(model: Path, backend: Backend) -> dict[str, Any]:
    unmeasured = dict.fromkeys(("first_invoke_ms", "latency_p50_ms", "latency_p95_ms"))
    named = dict.fromkeys(("model", "version", "runtime"), "")
    said = {
        "message": f"cannot try a model: {model} has no model.json",
        "remedy": "name a prepared folder: --model DIR",
    }
    return {"passed": False, "backend": backend, "reason": "no-model", "oks": 0.0, **unmeasured, **named, **said}


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

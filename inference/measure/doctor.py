"""`avocado-infer doctor`: is everything there that the pose service needs on this board, and does it belong together?

One line for each thing: the runtime, the accelerator's profile, its library, device nodes and modules, the model and
whether its files were made for what this board has, the camera, the temperature. It starts no inference and takes no
device, so it may run beside the service; `avocado-infer try` is what runs the model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from inference.accelerator import Accelerator, load_accelerator
from inference.config import PoseConfig, read_config
from inference.errors import InferenceError
from inference.model import CPU, Model, load_model
from inference.operators import check_operators
from inference.pairing import ALWAYS, mismatch
from inference.processes import python_command

DESCRIPTION = """\
Look at what the pose service needs on this board, one line for each thing, and say what to do about what is wrong.
Nothing is started and no device is taken, so it may run beside the service.

  avocado-infer doctor
  avocado-infer doctor --profile myboard.toml --model DIR -o json

Exit status: 0 no problem; 1 at least one; 2 the command line is wrong. What cannot be known here is no problem.
"""
_PROBE_DEADLINE_S = 20
_HOT_MARGIN_C = 5.0
_HOT_WITHOUT_TRIP_C = 95.0


class State(StrEnum):
    """How one thing is."""

    OK = "ok"
    PROBLEM = "problem"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    what: str
    state: State
    found: str
    remedy: str = ""


def register(subparsers: Any) -> None:
    """Add the verb's parser."""
    parser = subparsers.add_parser(
        "doctor",
        help="look at everything the pose service needs on this board",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, help="pose.toml (default: /etc/avocado/pose.toml, if there is one)")
    parser.add_argument("--profile", help="accelerator profile or its file (default: what pose.toml says)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="the model folder (default: what pose.toml says)")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; 1 when one of them is a problem."""
    config = read_config(arguments.config)
    profile = arguments.profile or config.accelerator.profile
    findings = list(examine(config, profile, arguments.model or Path(config.model.folder)))
    healthy = all(finding.state is not State.PROBLEM for finding in findings)
    if arguments.output == "json":
        print(json.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in findings]}, indent=1))
        return 0 if healthy else 1
    for finding in findings:
        print(f"{finding.state:8} {finding.what:12} {finding.found}")
        if finding.remedy:
            print(f"{'':21} try: {finding.remedy}")
    return 0 if healthy else 1


def examine(config: PoseConfig, profile: str, folder: Path, sysfs: Path = Path("/sys")) -> Iterator[Finding]:
    """Everything, in the order in which the service meets it."""
    runtime, versions = _runtime()
    yield runtime
    accelerator, found = _profile(profile)
    yield found
    if accelerator is not None:
        yield from _library(accelerator)
        yield from _nodes(accelerator)
        yield from _modules(accelerator, sysfs)
    model, found = _model(folder)
    yield found
    if accelerator is not None and model is not None:
        for name in dict.fromkeys((accelerator.name, CPU)):
            yield _file(model, accelerator, name, versions)
    yield _camera(config)
    yield _temperature(sysfs)


def _profile(profile: str) -> tuple[Accelerator | None, Finding]:
    try:
        accelerator = load_accelerator(profile)
    except InferenceError as error:
        return None, _problem("profile", error)
    return accelerator, Finding("profile", State.OK, accelerator.summary or accelerator.name)


def _model(folder: Path) -> tuple[Model | None, Finding]:
    try:
        model = load_model(folder)
    except InferenceError as error:
        return None, _problem("model", error)
    return model, Finding("model", State.OK, f"{model.name} {model.version} in {folder}")


def _problem(what: str, error: InferenceError) -> Finding:
    return Finding(what, State.PROBLEM, error.message, error.remedy)


def _runtime() -> tuple[Finding, dict[str, str]]:
    try:
        # Imported here: that it cannot be is a finding.
        from inference import litert
    except ImportError as error:
        remedy = "install ai-edge-litert, or the board's tflite_runtime"
        return Finding("runtime", State.PROBLEM, f"cannot import an inference runtime: {error}", remedy), {}
    return Finding("runtime", State.OK, f"{litert.RUNTIME} {litert.RUNTIME_VERSION}"), litert.versions()


def _library(accelerator: Accelerator) -> Iterator[Finding]:
    if accelerator.delegate is None:
        return
    path = accelerator.delegate.path
    if "/" not in path:
        yield Finding("delegate", State.UNKNOWN, f"{path} is the loader's to find")
    elif Path(path).is_file():
        yield Finding("delegate", State.OK, path)
    else:
        yield Finding(
            "delegate", State.PROBLEM, f"{path} does not exist", "install the board's NPU package, or the npu extension"
        )


def _nodes(accelerator: Accelerator) -> Iterator[Finding]:
    for node in accelerator.nodes:
        if not Path(node).exists():
            yield Finding("node", State.PROBLEM, f"{node} does not exist", "load the driver; check the npu extension")
        elif not os.access(node, os.R_OK | os.W_OK):
            yield Finding(
                "node", State.PROBLEM, f"{node} cannot be opened by this user", "run this as root or avocado-infer"
            )
        else:
            yield Finding("node", State.OK, node)


def _modules(accelerator: Accelerator, sysfs: Path) -> Iterator[Finding]:
    for module in accelerator.modules:
        folder = sysfs / "module" / module
        version = folder / "version"
        if not folder.is_dir() and all(Path(node).exists() for node in accelerator.nodes):
            yield Finding("module", State.UNKNOWN, f"{module} is built into the kernel, or has another name")
        elif not folder.is_dir():
            yield Finding("module", State.PROBLEM, f"{module} is not loaded", f"modprobe {module}; see journalctl -k")
        else:
            told = version.read_text().strip() if version.exists() else ""
            yield Finding("module", State.OK, f"{module} {told}".strip())


def _file(model: Model, accelerator: Accelerator, name: str, versions: dict[str, str]) -> Finding:
    """Whether the file of one accelerator is there, can be run by it and was made for it."""
    what = f"for {name}"
    npu = accelerator.delegate is not None and name == accelerator.name
    try:
        file = model.file_for(name)
        operators = accelerator.delegate.operators if npu and accelerator.delegate else ()
        check_operators(file, operators, versions.get("runtime", "the runtime"))
        rules = {**ALWAYS, **({key: one.rule for key, one in accelerator.pairing.items()} if npu else {})}
        board = versions | (_installed(accelerator) if npu else {})
        made_for = model.made_for(name)
        if wrong := mismatch(made_for, board, rules):
            raise wrong.error(model.name, name)
    except InferenceError as error:
        return _problem(what, error)
    judged = [f"{rule} {made_for[rule]}" for rule in rules if rule in made_for and rule in board]
    return Finding(what, State.OK, f"{file.name}, made for {', '.join(judged) or 'no known version'}")


def _installed(accelerator: Accelerator) -> dict[str, str]:
    """In a process of its own: a vendor's library may hang or crash when it is loaded."""
    if accelerator.delegate is None or not accelerator.pairing:
        return {}
    sources = json.dumps({what: one.model_dump(mode="json") for what, one in accelerator.pairing.items()})
    line = python_command("inference.installed", sources, accelerator.delegate.path)
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=_PROBE_DEADLINE_S, check=True)
        found: dict[str, str] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        raise InferenceError(
            f"cannot ask {accelerator.delegate.path} for its version: {error}", "look at journalctl -k"
        ) from error
    return found


def _camera(config: PoseConfig) -> Finding:
    # Imported here: they load the picture libraries.
    from inference.capture.source import REPLAY_FOLDER
    from inference.capture.v4l2 import capture_devices

    source = config.camera.source
    kind, _, argument = source.partition(":")
    devices = [str(device) for device in capture_devices()]
    if source == "auto":
        kind, argument = ("v4l2", devices[0]) if devices else ("replay", str(REPLAY_FOLDER))
    if kind == "v4l2" and argument in devices:
        return Finding("camera", State.OK, f"v4l2:{argument}")
    if kind == "replay" and any(Path(argument).glob("*.jpg")):
        return Finding("camera", State.OK, f"replay:{argument}")
    found = (
        f"{argument} is no capture device" if kind == "v4l2" else f"no capture device, and no pictures in {argument}"
    )
    return Finding("camera", State.PROBLEM, found, "plug in a camera, or set camera.source in /etc/avocado/pose.toml")


def _temperature(sysfs: Path) -> Finding:
    """The zone that is nearest to where the kernel acts."""
    zones = [zone for zone in map(_zone, sorted(sysfs.glob("class/thermal/thermal_zone*"))) if zone is not None]
    if not zones:
        return Finding("temperature", State.UNKNOWN, "no thermal zone tells one")
    name, now, limit = min(zones, key=lambda zone: zone[2] - zone[1])
    found = f"{name} has {now:.0f} °C of {limit:.0f}"
    if now > limit - _HOT_MARGIN_C:
        return Finding("temperature", State.PROBLEM, found, "cool the board: it slows down or switches off")
    return Finding("temperature", State.OK, found)


def _zone(folder: Path) -> tuple[str, float, float] | None:
    """Name, temperature and the lowest trip that is passive, hot or critical, in °C."""
    try:
        now = int((folder / "temp").read_text()) / 1000
        name = (folder / "type").read_text().strip()
    except (OSError, ValueError):
        return None
    trips = []
    for kind in folder.glob("trip_point_*_type"):
        try:
            trip = int(kind.with_name(kind.name.replace("_type", "_temp")).read_text()) / 1000
            if kind.read_text().strip() in ("passive", "hot", "critical") and trip > 0:
                trips.append(trip)
        except (OSError, ValueError):
            continue
    return name, now, min(trips, default=_HOT_WITHOUT_TRIP_C)

"""`avocado-infer serve`: the pose service's wiring, and nothing else that decides.

camera -> crop -> supervisor -> page, bus and metrics, in one asyncio loop; the model runs in processes below the
supervisor. Ready means that the first frame was answered or refused, or that the camera is known to be absent.
systemd's watchdog is fed only while the supervisor's heartbeat is fresh, so a hang of either is repaired by a restart,
and an unplugged camera is not a hang. SIGTERM ends it in under two seconds.

Exit status: 0 stopped on request, 1 it could not go on, 78 the configuration must be corrected first.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from pathlib import Path

from inference import journal
from inference.accelerator import load_accelerator
from inference.config import AcceleratorConfig, ConfigError, PoseConfig, keys_help, read_config
from inference.errors import InferenceError
from inference.journal import event, in_one_line, set_up_logging
from inference.link import SupervisorLink, SupervisorSettings
from inference.model import load_model
from inference.notify import Notifier

EXIT_CONFIG = 78

_log = logging.getLogger(__name__)


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `serve` to the command line."""
    parser = subparsers.add_parser(
        "serve",
        help="run the pose service",
        description="Run the pose service until SIGTERM.",
        epilog=f"pose.toml, every key with its default:\n\n{keys_help()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, help="pose.toml (default: /etc/avocado/pose.toml, if there is one)")
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=Path(os.environ.get("RUNTIME_DIRECTORY", "/run/avocado-pose").partition(":")[0]),
        help="folder for sockets and control files (default: $RUNTIME_DIRECTORY or /run/avocado-pose)",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log every detail")


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM; returns the exit status."""
    set_up_logging(arguments.verbose)
    try:
        config = read_config(arguments.config)
        return asyncio.run(_serve(config, arguments.run_dir))
    except ConfigError as error:
        _log.error("%s", in_one_line(error))
        return EXIT_CONFIG
    except InferenceError as error:
        _log.error("%s", in_one_line(error))
        return 1


async def _serve(config: PoseConfig, run_dir: Path) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    notifier = Notifier()
    notifier.send(STATUS="loading the model")
    run_dir.mkdir(parents=True, exist_ok=True)
    model = load_model(Path(config.model.folder))
    profile = _profile(config)
    accelerator = load_accelerator(profile)
    settings = SupervisorSettings(model_dir=model.folder, profile=profile, run_dir=run_dir)
    starting = asyncio.create_task(SupervisorLink.start(settings))
    # Lets the task spawn the supervisor: the runtime below it and the page's libraries here load at the same time.
    await asyncio.sleep(0)
    from inference.pose_service import PoseService

    link = await starting
    try:
        await PoseService(config, model, accelerator, link).run(stop, notifier)
    finally:
        notifier.send(STOPPING=1, STATUS="stopping")
        await link.close()
    _log.info("stopped", extra=event(journal.SERVICE_STOPPED))
    return 0


def _profile(config: PoseConfig) -> str:
    path = config.accelerator.profile
    if path == AcceleratorConfig().profile and not Path(path).exists():
        _log.warning("no NPU extension is merged (%s is missing): the CPU serves", path)
        return "cpu"
    return path

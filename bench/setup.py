"""What a machine that only prepares models downloads, and how long it takes from nothing to a prepared MoveNet.

Everything into empty folders: the wheels of requirements/prepare.txt, a fresh environment, the weights out of their
package, then the recipe that takes longest. The pictures must be there already (`make model`): they and the video
decoder are not a part of it. Writes build/bench/setup.json.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inference.prepare.download import archive_of
from inference.prepare.fetch import WEIGHTS

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "build/assets"
LOCK = ROOT / "requirements/prepare.txt"
LIMIT_MB = 80
LIMIT_MIB = 1024
_PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")
_DEADLINE_S = 1800


def main() -> int:
    """0 when the downloads and the recipe's memory keep their limits."""
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        seconds[what] = round(time.monotonic() - started, 1)

    with tempfile.TemporaryDirectory(prefix="avocado-setup-") as scratch:
        folder = Path(scratch)
        python, wheels = folder / "venv/bin/python", folder / "wheels"
        with timed("downloading packages"):
            line = [
                "download",
                "--no-cache-dir",
                "--only-binary",
                ":all:",
                "--require-hashes",
                "-r",
                LOCK,
                "-d",
                wheels,
            ]
            _run(sys.executable, *_PIP, *line)
        os.environ["AVOCADO_CACHE"] = str(folder / "cache")
        with timed("downloading weights"):
            weights = archive_of(WEIGHTS).stat().st_size
        with timed("installing"):
            _run(sys.executable, "-m", "venv", folder / "venv")
            here = ["--no-index", "--find-links", wheels]
            _run(python, *_PIP, "install", *here, "--require-hashes", "-r", LOCK)
            _run(python, *_PIP, "install", *here, "--no-deps", "--no-build-isolation", "-e", ROOT)
        sizes = {path.name: path.stat().st_size for path in wheels.iterdir()}
        with timed("preparing MoveNet"):
            graph = ASSETS / "movenet-lightning.json"
            _run(python, "-m", "inference.cli", "prepare", graph, "--target", "imx8mp-evk", "--out", folder / "model")
    packages_mb, weights_mb = sum(sizes.values()) / 1e6, weights / 1e6
    peak_mib = round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)
    tensorflow = sorted(name for name in sizes if name.startswith(("tensorflow", "tf_", "keras")))
    print(f"{len(sizes)} packages {packages_mb:.1f} MB, weights {weights_mb:.1f} MB", end="")
    print(f": {packages_mb + weights_mb:.1f} MB of downloads, at most {LIMIT_MB}; TensorFlow: {tensorflow or 'none'}")
    print(", ".join(f"{what} {took} s" for what, took in seconds.items()), end="")
    print(f"; at most {peak_mib} MiB, {LIMIT_MIB} are allowed; load {os.getloadavg()[0]:.1f}")
    figures = {
        "packages": sizes,
        "packages_mb": round(packages_mb, 1),
        "weights_mb": round(weights_mb, 1),
        "seconds": seconds,
        "peak_mib": peak_mib,
        "load_average": os.getloadavg()[0],
    }
    out = ROOT / "build/bench/setup.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(figures, indent=1) + "\n")
    good = packages_mb + weights_mb <= LIMIT_MB and peak_mib <= LIMIT_MIB and not tensorflow
    return 0 if good else 1


def _run(program: Path | str, *arguments: Path | str) -> None:
    subprocess.run([str(program), *map(str, arguments)], check=True, timeout=_DEADLINE_S, cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())

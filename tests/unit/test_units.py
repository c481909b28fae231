"""The units stay as closed as they were made, and every point that is left has its reason in the unit file."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNITS = Path(__file__).resolve().parents[2] / "units/systemd"
MOST = {"avocadod.service": 3.0, "pose.service": 2.0, "pose-reset.service": 2.4, "avocado-update.service": 1.6}


def analyze(*unit: str) -> list[str]:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    if int(version.split()[1]) < 257:
        pytest.skip(f"its points are those of systemd 257, here is {version.split()[1]}; tests/device asks the board's")
    argv = [program, "security", "--no-pager", "--offline=true", *unit]
    return subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False).stdout.splitlines()


@pytest.mark.parametrize("unit", MOST)
def test_the_exposure_stays_below_its_bound(unit: str) -> None:
    verdict = analyze(str(UNITS / unit))[-1]
    found = re.search(r"service: (\d+\.\d+)", verdict)
    assert found is not None, verdict
    assert float(found[1]) <= MOST[unit]


@pytest.mark.parametrize("unit", MOST)
def test_the_reasons_are_written_where_the_rights_are(unit: str) -> None:
    text = (UNITS / unit).read_text()
    reasons = text.partition("# What systemd-analyze security still counts")[2]
    assert len(re.findall(r"^#   \S+.* {2,}\S", reasons, re.MULTILINE)) >= 8


def test_nothing_is_mounted_below_what_a_switch_replaces() -> None:
    """A mount there, in the agent's own namespace, would keep the old /usr in it when the board's is replaced."""
    lines = (UNITS / "avocadod.service").read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if re.match(r"\w+=", line))
    hides = (
        "InaccessiblePaths",
        "ReadOnlyPaths",
        "ReadWritePaths",
        "BindPaths",
        "BindReadOnlyPaths",
        "TemporaryFileSystem",
    )
    assert settings.get("ProtectKernelModules", "no") == "no"
    assert not [name for name in hides if re.search(r"/(usr|opt|etc)\b", settings.get(name, ""))]

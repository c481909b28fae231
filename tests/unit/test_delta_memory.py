"""Applying takes the same few megabytes whatever the image: the whole command, measured by the kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agent.delta.format import MAX_SEGMENT_BYTES, MAX_WINDOW_BYTES
from tests.deltas import write_pair

ROOT = Path(__file__).parents[2]
MOST_KIB = 24 << 10
PEAK = "; print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"


def peak_kib(code: str, *arguments: str) -> int:
    """The most memory a fresh Python held while it ran this."""
    line = [sys.executable, "-I", "-c", code + PEAK, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=600)
    return int(done.stdout.split()[-1])


def above_bare_kib(folder: Path, size: int) -> int:
    folder.mkdir()
    write_pair(folder, size)
    files = [str(folder / name) for name in ("old", "delta", "out")]
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from agent.cli import main; "
    code += "assert main(['delta', 'apply', *sys.argv[1:]]) == 0"
    try:
        return peak_kib(code, *files) - peak_kib("pass")
    finally:
        for name in files:
            Path(name).unlink(missing_ok=True)


def test_applying_a_small_image_takes_24_mib_at_most(tmp_path: Path) -> None:
    assert above_bare_kib(tmp_path / "small", 4 * MAX_SEGMENT_BYTES) <= MOST_KIB


@pytest.mark.long
def test_applying_a_gibibyte_takes_no_more_than_applying_three_megabytes(tmp_path: Path) -> None:
    small, large = above_bare_kib(tmp_path / "small", 3 << 20), above_bare_kib(tmp_path / "large", 1 << 30)
    print(f"above a bare Python: {small / 1024:.1f} MiB for 3 MiB, {large / 1024:.1f} MiB for 1 GiB")
    assert max(small, large) <= MOST_KIB
    assert large - small <= MAX_WINDOW_BYTES >> 10  # the window of the small one is only as long as its base

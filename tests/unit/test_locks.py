"""The lock files: the same versions everywhere, every one hashed, and TensorFlow nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

LOCKS = sorted((Path(__file__).parents[2] / "requirements").glob("*.txt"))


def locked(path: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([a-z0-9.-]+)==([^\s;]+)", path.read_text(), re.MULTILINE):
        found.setdefault(name, set()).add(version)
    return found


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_no_lock_brings_tensorflow(path: Path) -> None:
    assert len(locked(path)) > 5
    assert not {name for name in locked(path) if name.startswith(("tensorflow", "tf-", "keras", "torch"))}


def test_whoever_only_prepares_models_has_the_versions_of_a_whole_set_up() -> None:
    prepare, dev = (locked(path) for name in ("prepare", "dev") for path in LOCKS if path.stem == name)
    assert {name: versions for name, versions in prepare.items() if dev.get(name) != versions} == {}
    assert "opencv-python-headless" not in prepare

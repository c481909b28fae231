from __future__ import annotations

from pathlib import Path

import pytest

from tests.inference import rig as rigs


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> rigs.Rig:
    rigs.require()
    monkeypatch.setenv(rigs.MARK, rigs.new_mark())
    made = rigs.Rig(tmp_path)
    made.node.touch()
    made.inject("ok")
    return made

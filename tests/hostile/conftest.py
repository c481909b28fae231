from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.board import Stage
from tests.hostile.server import Server, serving


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


@pytest.fixture
def server(stage: Stage) -> Iterator[Server]:
    with serving(stage.repository) as running:
        yield running

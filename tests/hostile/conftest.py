from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.hostile.case")

from tests.hostile.board import Stage  # noqa: E402
from tests.hostile.server import Server, serving  # noqa: E402


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.close()


@pytest.fixture
def server(stage: Stage) -> Iterator[Server]:
    with serving(stage.repository) as running:
        stage.server = running
        yield running

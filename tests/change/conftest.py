"""The matrix runs thousands of changes; their journal lines would drown a failure's message."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _quiet(request: pytest.FixtureRequest) -> Iterator[None]:
    log = logging.getLogger("avocado.change")
    log.disabled = "caplog" not in request.fixturenames
    yield
    log.disabled = False

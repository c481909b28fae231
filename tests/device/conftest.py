"""Boards for tests: one per module, destroyed at its end, and at the end of the session proof that nothing was left."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator

import pytest

from tests.device.board import Board
from tests.device.host import obstacle
from tests.device.reference import FIRST_MODEL, NEW_MODEL, Reference, wait_until_serving

# The first board on a machine waits for its root file system to be built.
TIMEOUT_S = 240
SERVING_S = 90.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("device") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def boards_made() -> Iterator[list[Board]]:
    """Every board the session makes. None of them may leave a trace on the host."""
    if (reason := obstacle()) is not None:
        pytest.skip(reason)
    made: list[Board] = []
    yield made
    left = {board.name: board.traces() for board in made}
    assert not any(left.values()), f"boards left something behind: {left}"


@pytest.fixture(scope="module")
def new_board(boards_made: list[Board], request: pytest.FixtureRequest) -> Iterator[Callable[[], Board]]:
    """Makes boards that are created and not yet booted, for tests that provision them first."""
    module = re.sub(r"\W|_", "-", request.module.__name__.rpartition(".")[2].removeprefix("test_"))
    here: list[Board] = []

    def make() -> Board:
        board = Board.create(f"{module}-{os.getpid()}-{len(here)}")
        here.append(board)
        boards_made.append(board)
        return board

    yield make
    for board in here:
        board.destroy()


@pytest.fixture(scope="module")
def board(new_board: Callable[[], Board]) -> Board:
    """The module's board, booted."""
    made = new_board()
    assert made.boot() == "running", made.exec(["systemctl", "--failed", "--no-legend"]).stdout
    return made


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The module's own project of the reference application, with its first model."""
    if not (NEW_MODEL / "model.json").exists() or not (FIRST_MODEL / "model.json").exists():
        pytest.skip("the models are not prepared; `make model` prepares them")
    return Reference.start(tmp_path_factory.mktemp("reference") / "project")


@pytest.fixture(scope="module")
def serving(new_board: Callable[[], Board], project: Reference) -> Board:
    """The module's board with that project's first runtime, serving on its NPU."""
    board = new_board()
    project.provision(board)
    board.boot()
    wait_until_serving(board, SERVING_S)
    return board

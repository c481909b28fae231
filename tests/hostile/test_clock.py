"""Clocks that lie: in 1970, in 2100, and jumping while something is fetched. Neither locked out nor frozen.

The clock is handed in: a board in a container shares its host's, which no test may set.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from agent.contract.errors import ErrorCode
from tests.hostile.board import NOW, Stage, image, later, refused
from tests.hostile.server import Handler, Server

DEAD, FAR = "1970-01-01T00:00:00Z", "2100-01-01T00:00:00Z"


def seen(stage: Stage) -> dict[str, object]:
    found: dict[str, object] = json.loads((stage.state / "metadata" / "seen.json").read_bytes())
    return found


@pytest.mark.parametrize("to", [DEAD, FAR])
@pytest.mark.parametrize("during", ["timestamp.json", "snapshot.json", "targets.json", "manifest.json"])
def test_a_clock_that_jumps_during_a_refresh_changes_nothing_about_it(
    stage: Stage, server: Server, during: str, to: str
) -> None:
    offered = stage.publish(image(0))

    def jump(handler: Handler, body: bytes) -> None:
        stage.clock = to
        handler.honest(body)

    server.rules[during] = jump
    assert stage.source(server.url).manifest() == offered
    assert seen(stage)["built_at"] == offered.built_at
    # The next refresh has a right clock again, and nothing of the wrong one was kept.
    server.rules.clear()
    stage.clock = NOW
    assert stage.source(server.url).manifest() == offered


@pytest.mark.parametrize("to", [DEAD, FAR])
def test_a_clock_that_jumps_during_a_transfer_neither_ends_nor_prolongs_it(
    stage: Stage, server: Server, to: str
) -> None:
    offered = stage.publish(image(0))

    def jump(handler: Handler, body: bytes) -> None:
        stage.clock = to
        handler.honest(body)

    server.rules[".full"] = jump
    source = stage.source(server.url)
    source.manifest()
    began = time.monotonic()
    fetched = source.fetch(offered.extensions[0], [], lambda done, total: None)
    assert (fetched.way, time.monotonic() - began < 5) == ("full", True)


def test_a_dead_clock_follows_new_publications_for_years(stage: Stage, server: Server) -> None:
    """Each signed `built_at` carries the time on, and what expired before it is refused from then on."""
    stage.clock = DEAD
    for number, days in enumerate((0, 200, 300)):
        built = later(days).strftime("%Y-%m-%dT%H:%M:%SZ")
        offered = stage.publish(image(number % 2), at=later(days), built_at=built)
        assert stage.source(server.url).manifest() == offered
        assert seen(stage)["built_at"] == built
    stage.edit("timestamp", lambda signed: signed.update(expires="2027-01-01T00:00:00Z", version=signed["version"] + 1))
    assert refused(stage.source(server.url).manifest).code is ErrorCode.REPOSITORY_STALE


def test_a_clock_in_2100_refuses_everything_and_writes_nothing_down(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    stage.source(server.url).manifest()
    before = stage.snapshot()
    stage.clock = FAR
    for _ in range(3):
        assert refused(stage.source(server.url).manifest).code is ErrorCode.ROOT_EXPIRED
    assert stage.snapshot() == before
    stage.clock = NOW
    stage.source(server.url).manifest()


def test_a_signed_time_to_come_does_not_become_the_floor(stage: Stage, server: Server) -> None:
    """Who publishes with a clock in 2100 makes signatures that expire after it; the publisher refuses to."""
    error = refused(lambda: stage.publish(image(0), built_at="2100-01-01T00:00:00Z"))
    assert error.code is ErrorCode.BAD_MANIFEST
    assert not Path(stage.state / "metadata" / "seen.json").exists()

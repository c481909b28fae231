"""What a board keeps of its trust, damaged: named, made again where another copy holds, and never forgotten."""

from __future__ import annotations

import pytest

from agent.contract.errors import ErrorCode
from agent.trust_state import problems
from tests.hostile.board import Stage, image, refused
from tests.hostile.server import Server


@pytest.mark.parametrize("damage", ["cut short", "gone", "a folder", "a loop", "noise", "empty"])
@pytest.mark.parametrize(
    "name", ["timestamp.json", "snapshot.json", "targets.json", "releases.json", "root_history/1.root.json"]
)
def test_a_damaged_cache_is_fetched_again_and_forgets_nothing(
    stage: Stage, server: Server, name: str, damage: str
) -> None:
    stage.publish(image(0))
    offered = stage.source(server.url).manifest()
    seen = (stage.state / "metadata" / "seen.json").read_bytes()
    path = stage.state / "metadata" / "cache" / name
    data = path.read_bytes()
    path.unlink()
    match damage:
        case "cut short":
            path.write_bytes(data[: len(data) // 2])
        case "a folder":
            path.mkdir()
        case "a loop":
            path.symlink_to(path.name)
        case "noise":
            path.write_bytes(bytes(range(256)) * 8)
        case "empty":
            path.touch()
    assert stage.source(server.url).manifest() == offered
    assert (stage.state / "metadata" / "seen.json").read_bytes() == seen
    assert path.read_bytes() == data


def test_a_damaged_anchor_is_named_and_nothing_is_fetched(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    path = stage.state / "metadata" / "root.json"
    path.write_bytes(path.read_bytes()[:100])
    before = stage.snapshot()
    error = refused(stage.source(server.url).manifest)
    assert error.code is ErrorCode.TRUST_STATE_DAMAGED
    assert error.message.startswith(f"cannot trust any repository: the provisioned {path} does not read (")
    assert error.remedy == "Provision this board again with 'avocadoctl provision'; its runtimes stay."
    assert stage.snapshot() == before
    assert server.asked == []


def test_a_damaged_record_of_versions_is_named_and_never_forgotten(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    stage.source(server.url).manifest()
    for name in ("seen.json", "seen.copy.json"):
        (stage.state / "metadata" / name).write_bytes(b'{"schema": 1}')
    path = stage.state / "metadata" / "seen.json"
    before = stage.snapshot()
    error = refused(stage.source(server.url).manifest)
    assert error.code is ErrorCode.TRUST_STATE_DAMAGED
    assert error.message == f"cannot trust any repository: {path} is damaged (KeyError: 'built_at')"
    assert stage.snapshot() == before
    assert problems(stage.state / "metadata")[0].message == error.message


@pytest.mark.parametrize("name", ["seen.json", "seen.copy.json"])
@pytest.mark.parametrize("damage", [b"", b"{", None, b'{"schema": 1, "root": 0}'])
def test_one_damaged_record_of_versions_is_made_again_from_the_other(
    stage: Stage, server: Server, name: str, damage: bytes | None
) -> None:
    stage.publish(image(0))
    offered = stage.source(server.url).manifest()
    path = stage.state / "metadata" / name
    good = path.read_bytes()
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
        assert [error.code for error in problems(stage.state / "metadata")] == [ErrorCode.TRUST_STATE_DAMAGED]
    assert stage.source(server.url).manifest() == offered
    assert path.read_bytes() == good
    assert problems(stage.state / "metadata") == []

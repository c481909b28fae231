"""The closing line of a deploy: what changed, bytes moved of how many, how long away, on which backend."""

from __future__ import annotations

from typing import Any

import pytest

from agent.host.deploy import Move, _lost, closing_line

HELD = Move("pose-app", "0.1.0", "0.1.0", False, "held", 0, 47_000_000).as_dict()
MODEL = Move("pose-model", "4.0", "4.1", True, "delta", 4984, 2_949_120).as_dict()
MENDED = Move("pose-model", "4.0", "4.0", False, "full", 2_000_000, 2_949_120).as_dict()
ARRIVED = {"name": "pose-model", "way": "full"}
APPLIED: dict[str, Any] = {
    "host": "root@board",
    "outcome": "applied",
    "dry_run": False,
    "moves": [HELD, MODEL],
    "moved_bytes": 4984,
    "image_bytes": 2_949_120,
    "away_s": 1.234,
    "backend": "npu",
    "change": {"facts": {}},
}


@pytest.mark.parametrize(
    ("document", "line"),
    [
        (APPLIED, "root@board: pose-model 4.0 -> 4.1; moved 5 kB of 2.95 MB; service away 1.23 s; back on npu"),
        (
            {**APPLIED, "image_bytes": 0, "away_s": None, "backend": None},
            "root@board: pose-model 4.0 -> 4.1; nothing to move",
        ),
        ({**APPLIED, "moves": [HELD], "image_bytes": 0, "away_s": None, "backend": None}, None),
        (
            {
                **APPLIED,
                "moves": [{**HELD, "way": "full"}, MENDED],
                "moved_bytes": 2_000_000,
                "away_s": None,
                "backend": None,
                "change": {"facts": {"images": [{"name": "pose-app", "way": "held"}, ARRIVED]}},
            },
            "root@board: pose-model 4.0 anew; moved 2.00 MB of 2.95 MB",
        ),
        (
            {**APPLIED, "moves": [HELD, MENDED], "moved_bytes": 0, "image_bytes": 0},
            "root@board: nothing to change, and no image of it is damaged",
        ),
        ({**APPLIED, "outcome": "unchanged"}, "root@board: nothing to change, it runs this runtime already"),
        (
            {**APPLIED, "dry_run": True, "change": {"facts": {"plan": [{"kind": "fetch_images"}, {"kind": "prune"}]}}},
            "root@board: would run fetch_images, prune; nothing was changed",
        ),
    ],
)
def test_one_line_says_what_happened(document: dict[str, Any], line: str | None) -> None:
    assert closing_line(document) == (line or "root@board: the same extensions; nothing to move")


def test_the_plan_names_what_moves_and_what_does_not() -> None:
    assert Move("a", "", "1", True, "full", 2_000_000, 3_000_000).line() == "  a none -> 1: full 2.00 MB of 3.00 MB"
    assert Move("a", "1", "1", False, "held", 0, 5).line() == "  a 1: unchanged"
    assert Move("a", "2", "1", True, "held", 0, 5).line() == "  a 2 -> 1: on the board already"


@pytest.mark.parametrize(
    ("runtime", "code", "lost"),
    [
        ({"id": "x"}, "image-missing", True),
        (None, "bad-manifest", True),
        ({"id": "x"}, "bad-manifest", False),  # of another runtime than the active one
        (None, "service-down", False),
    ],
)
def test_every_image_is_offered_where_nobody_knows_what_else_is_lost(runtime: Any, code: str, *, lost: bool) -> None:
    assert _lost({"runtime": runtime, "problems": [{"code": code}]}) is lost

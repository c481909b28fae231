"""`avocadoctl history show N`, word for word."""

from __future__ import annotations

from typing import Any

from agent.verbs.client import closing_line
from agent.verbs.history import render

RECORD: dict[str, Any] = {
    "number": 7,
    "kind": "deploy",
    "requested_by": "root (ann@desk)",
    "from_runtime": "a",
    "to_runtime": "b",
    "outcome": "applied",
    "committed": True,
    "reason": None,
    "started_at": "2026-11-30T22:00:00Z",
    "ended_at": "2026-11-30T22:00:09Z",
    "steps": [
        {"kind": "stop_services", "phase": "done", "warning": ""},
        {"kind": "activate", "phase": "done", "warning": "a clean-up is left"},
    ],
    "facts": {
        "image_bytes": 2 << 20,
        "moved_bytes": 1536,
        "away_s": 3.299,
        "first_backend": "npu",
        "backend": "npu",
        "model": "movenet-lightning 4.1",
        "took_s": {"stop_services": 0.79},
        "images": [
            {"name": "pose-model", "way": "delta", "moved_bytes": 1536, "size_bytes": 2 << 20},
            {"name": "pose-app", "way": "held", "moved_bytes": 0, "size_bytes": 9},
        ],
    },
}


def test_a_change_in_full_reads_as_what_happened() -> None:
    assert render(RECORD) == (
        "Change     #7 deploy, asked for by root (ann@desk)\n"
        "From       a\n"
        "To         b\n"
        "Outcome    applied\n"
        "Time       2026-11-30T22:00:00Z to 2026-11-30T22:00:09Z\n"
        "Moved      1.5 KiB of 2.0 MiB\n"
        "Away       3.30 s, first answer from the npu\n"
        "Proven     movenet-lightning 4.1 on npu\n"
        "\n"
        "STEP           PHASE  TOOK    WARNING\n"
        "stop_services  done   0.79 s\n"
        "activate       done           a clean-up is left\n"
        "\n"
        "IMAGE       WAY    MOVED\n"
        "pose-model  delta  1.5 KiB of 2.0 MiB"
    )


def test_a_dry_run_lists_what_it_would_do() -> None:
    facts = {"dry_run": True, "plan": [{"kind": "fetch_images", "inputs": {}}, {"kind": "prune", "inputs": {}}]}
    planned = RECORD | {"outcome": "planned", "committed": False, "steps": [], "facts": facts}
    assert render(planned).endswith(
        "Outcome    planned\n"
        "Time       2026-11-30T22:00:00Z to 2026-11-30T22:00:09Z\n"
        "\n"
        "STEP          PHASE    TOOK  WARNING\n"
        "fetch_images  planned\n"
        "prune         planned"
    )
    assert closing_line(planned) == "change #7 deploy: planned; it would run fetch_images, prune"

"""What is not as it should be, seen from outside: the last change, the owned services, and what the pose service says.

Pure: every problem is named with what to type next. What is merged is judged by extensions.py, what was changed by hand
by drift.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.change.record import ChangeRecord, Outcome
from agent.contract.status import SILENT, ProblemEntry
from agent.health import UnitState


def change_problems(record: ChangeRecord | None) -> list[ProblemEntry]:
    """A last change that could neither go on nor back: nobody looks at the board again by itself."""
    if record is None or record.outcome is not Outcome.STUCK or record.reason is None:
        return []
    return [
        {
            "code": "change-stuck",
            "message": f"change {record.number} ({record.kind}) is stuck: {record.reason.message}",
            "remedy": record.reason.remedy,
        }
    ]


def service_problems(services: Mapping[str, UnitState], *, partial: bool) -> list[ProblemEntry]:
    """Owned services that are not as they should be. `partial`: extensions are disabled here, their units with them."""
    down = (state for state in services.values() if state.active not in ("active", "activating", "reloading"))
    return [_down(state) for state in down if not (partial and state.load == "not-found")]


def _down(state: UnitState) -> ProblemEntry:
    match state.load:
        case "masked":
            message, remedy = "masked", f"Let it run again: systemctl unmask {state.name}; systemctl start {state.name}"
        case "not-found":
            message, remedy = "not installed", "See which extensions are merged: avocadoctl ext status"
        case _ if state.active == "inactive" and state.result == "success":
            message, remedy = "stopped", f"Start it: systemctl start {state.name}"
        case _:
            message = f"{state.active} ({state.result or state.sub})"
            remedy = f"See why: journalctl -b -n 30 -u {state.name}"
    return {"code": "service-down", "message": f"{state.name} is {message}", "remedy": remedy}


def inference_problems(inference: Mapping[str, Any]) -> list[ProblemEntry]:
    """What the pose service says is not as this board could do it."""
    state, camera = inference.get("state"), inference.get("camera") or {}
    said, remedy = str(inference.get("message") or ""), str(inference.get("remedy") or "")
    if state == SILENT:
        return [
            {"code": "inference-silent", "message": said, "remedy": "Start it again: systemctl restart pose.service"}
        ]
    if state == "no-camera":
        why = camera.get("problem") or "it is not connected"
        return [
            {
                "code": "no-camera",
                "message": f"the pose service has no camera ({camera.get('source', 'none')}): {why}",
                "remedy": "Check the cable and `ls /dev/video*`; the service takes the camera up again by itself.",
            }
        ]
    if state == "degraded":
        why = f"{inference.get('reason')}{f'; {said}' if said else ''}"
        return [
            {
                "code": "inference-degraded",
                "message": f"the pose service answers on {inference.get('backend')} ({why})",
                "remedy": remedy or "Wait for the NPU to come back; see why: journalctl -b -n 30 -u pose.service",
            }
        ]
    return []

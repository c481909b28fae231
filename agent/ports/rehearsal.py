"""The Rehearsal port: a transient unit in which the pose service's user alone sees a set that is not shown yet.

PID 1 starts it, since the agent is sandboxed and a process of the agent's would die with it at a restart that nobody
asked for; RuntimeMaxSec= and the next start's undo bound it instead. It is as closed as pose.service, and steps back
behind whatever serves meanwhile: a lower priority, the disk only when nobody else wants it, first to go where memory
is short. Not CPUWeight=: it would put every service into a scheduling group of its own, and on some kernels those may
have no real-time process, which the live supervisor is. What the program prints goes into a file that the unit's user
cannot write to.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from dbus_fast import Variant

from agent.contract import errors, release
from agent.contract.errors import OperationError
from agent.plan import INFERENCE_UNIT
from agent.ports import child, hierarchies, image_child, mounts, overlay_child, process, rehearsal_child, unit_files
from agent.ports.overlay import GaplessOverlay
from agent.ports.protocols import Overlay, Switching, Tried
from agent.ports.systemd import SystemdUnits
from agent.tried import read_answer, unknown

UNIT = "avocado-warm-up.service"
_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 15.0
_SLACK_S = 10.0  # the step's own deadline comes first and says more
_MAX_BYTES = 1 << 18  # of JSON whose parts are bounded by the child
_CAP_DAC_READ_SEARCH, _CAP_SETGID, _CAP_SETUID, _CAP_SYS_ADMIN = 2, 6, 7, 21
_CLONE_NEWNS, _IDLE, _EPERM = 0x00020000, 3, 1
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"


class UnitRehearsal:
    """The port for boards whose overlays can be built where nobody sees them."""

    def __init__(self, units: SystemdUnits, overlay: Overlay, switching: Switching, answer: Path) -> None:
        self._units = units
        self._overlay = overlay
        self._switching = switching
        self._answer = answer
        self._command = child.command(
            errors, release, process, mounts, image_child, hierarchies, overlay_child, unit_files, rehearsal_child
        )

    def begin(self, runtime: Path, timeout_s: float, *, only_cpu: bool) -> None:
        """The model of this runtime folder's set is being tried. Raises `unsupported`, or `unit-failed`."""
        if not isinstance(self._overlay, GaplessOverlay):
            raise OperationError(
                errors.ErrorCode.UNSUPPORTED,
                f"cannot show a set to one process alone: this board switches by reload ({self._switching.reason})",
            )
        self.end()
        service = self._units.settings(INFERENCE_UNIT, ["User", "SupplementaryGroups", "CacheDirectory", "Environment"])
        caches = [f"/var/cache/{name}" for name in service["CacheDirectory"]]
        request = self._overlay.request_for(runtime) | {
            "user": service["User"] or "root",
            "groups": service["SupplementaryGroups"],
            "env": {"PATH": _PATH, **_pairs(service["Environment"]), "CACHE_DIRECTORY": ":".join(caches)},
            "words": ["--backend", "cpu"] if only_cpu else [],
            "timeout_s": timeout_s + _SLACK_S,
            # All of the above is what systemd has read; the set's own files may say something else.
            "unit": INFERENCE_UNIT,
            "unit_files": unit_files.contents(*self._units.files(INFERENCE_UNIT)),
        }
        argv = [*self._command, base64.b64encode(json.dumps(request).encode()).decode()]
        self._units.start_transient(UNIT, self._properties(argv, caches, timeout_s + 2 * _SLACK_S), _START_TIMEOUT_S)

    def result(self) -> Tried | None:
        """What came of it; None while it runs."""
        state = self._units.states([UNIT])[UNIT]
        if state.active in ("activating", "active", "deactivating", "reloading"):
            return None
        self._units.forget(UNIT)
        try:
            with self._answer.open("rb") as file:
                answer = json.loads(file.read(_MAX_BYTES))
        except (OSError, ValueError, RecursionError):
            answer = None
        finally:
            self._answer.unlink(missing_ok=True)
        if not isinstance(answer, dict):
            return unknown(f"{UNIT} ended without an answer ({state.result or 'nobody knows why'})")
        if isinstance(answer.get("error"), dict):
            raise OperationError.from_dict(answer["error"])
        return read_answer(answer)

    def end(self) -> None:
        """Nobody tries anything: the unit is gone, and what was mounted in it with it."""
        self._units.stop(UNIT, _STOP_TIMEOUT_S)
        self._units.forget(UNIT)
        self._answer.unlink(missing_ok=True)

    def _properties(self, argv: list[str], writable: list[str], timeout_s: float) -> list[list[Any]]:
        capabilities = (_CAP_DAC_READ_SEARCH, _CAP_SETGID, _CAP_SETUID, _CAP_SYS_ADMIN)
        values = {
            "Description": Variant("s", "Trial of the next model"),
            "Type": Variant("s", "exec"),
            "ExecStart": Variant("a(sasb)", [[argv[0], argv, False]]),
            "RuntimeMaxUSec": Variant("t", int(timeout_s * 1_000_000)),
            "TimeoutStopUSec": Variant("t", 3_000_000),
            "StandardOutputFileToTruncate": Variant("s", str(self._answer)),
            "StandardError": Variant("s", "journal"),
            # It gives way to the model that serves.
            "Nice": Variant("i", 19),
            "IOSchedulingClass": Variant("i", _IDLE),
            "OOMScoreAdjust": Variant("i", 900),
            "LimitCORE": Variant("t", 0),
            # As pose.service, but for what the mounts take until the program is the service's user: no capability is
            # left by then, and no program gives one back.
            "CapabilityBoundingSet": Variant("t", sum(1 << capability for capability in capabilities)),
            "AmbientCapabilities": Variant("t", 0),
            "NoNewPrivileges": Variant("b", True),
            "SystemCallFilter": Variant("(bas)", [True, ["@system-service", "@mount"]]),
            "SystemCallErrorNumber": Variant("i", _EPERM),
            "RestrictNamespaces": Variant("t", _CLONE_NEWNS),
            "RestrictAddressFamilies": Variant("(bas)", [True, ["AF_UNIX", "AF_INET", "AF_INET6"]]),
            "RestrictRealtime": Variant("b", True),
            "RestrictSUIDSGID": Variant("b", True),
            "LockPersonality": Variant("b", True),
            "ProtectSystem": Variant("s", "strict"),
            "ReadWritePaths": Variant("as", [f"-{path}" for path in writable]),
            "ProtectHome": Variant("s", "yes"),
            "ProtectKernelTunables": Variant("b", True),
            "ProtectKernelLogs": Variant("b", True),
            "ProtectControlGroups": Variant("b", True),
            "ProtectProc": Variant("s", "invisible"),
            "UMask": Variant("u", 0o077),
        }
        return [[name, value] for name, value in values.items()]


def _pairs(environment: list[str]) -> dict[str, str]:
    return dict(assignment.partition("=")[::2] for assignment in environment)

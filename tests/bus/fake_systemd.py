"""systemd's manager as far as the agent talks to it: a small program with memory, a call record and one hook.

Units are names with a state. Jobs end at once, with a JobRemoved signal after the reply, as systemd's do; `fail_when`
says which job ends how. Reloading systemd-sysext.service merges what lies in the active folder, or in the folder
bind-mounted over it; the fake `systemd-sysext` program reads the result from a file.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from dbus_fast import BusType, DBusError, PropertyAccess
from dbus_fast.aio import MessageBus
from dbus_fast.annotations import DBusBool, DBusInt32, DBusObjectPath, DBusSignature, DBusStr, DBusUInt32
from dbus_fast.service import ServiceInterface, dbus_method, dbus_property, dbus_signal

from agent.ports.overlay_reload import link_names

PATH = "/org/freedesktop/systemd1"
DBusNothing = Annotated[None, DBusSignature("")]
Row = Annotated[list[Any], DBusSignature("a(ssssssouso)")]
Names = Annotated[list[str], DBusSignature("as")]
Properties = Annotated[list[Any], DBusSignature("a(sv)")]
Auxiliary = Annotated[list[Any], DBusSignature("a(sa(sv))")]

_PROGRAM = """#!/bin/sh
exec cat {state}/{kind}.json
"""


@dataclass
class FakeUnit:
    """One unit."""

    name: str
    active: str = "inactive"
    load: str = "loaded"
    result: str = "success"
    exit_status: int = 0
    restarts: int = 0
    what: str = ""
    argv: tuple[str, ...] = ()
    properties: dict[str, Any] = field(default_factory=dict)  # of a transient one
    ignores_stop: bool = False  # as a process that ignores SIGTERM
    survives_kill: bool = False  # as one that hangs in the kernel
    files: tuple[str, ...] = ()  # the fragment and the drop-ins
    after: tuple[str, ...] = ()
    required_by: tuple[str, ...] = ()
    type: str = "simple"
    kill_mode: str = "control-group"

    @property
    def path(self) -> str:
        return f"{PATH}/unit/" + "".join(c if c.isalnum() else f"_{ord(c):02x}" for c in self.name)

    def row(self) -> list[Any]:
        sub = {"active": "running", "inactive": "dead"}.get(self.active, self.active)
        return [self.name, "a unit", self.load, self.active, sub, "", self.path, 0, "", "/"]


class _Service(ServiceInterface):
    def __init__(self, unit: FakeUnit) -> None:
        super().__init__("org.freedesktop.systemd1.Service")
        self.unit = unit

    @dbus_property(PropertyAccess.READ, "Result")
    def result(self) -> DBusStr:
        return self.unit.result

    @dbus_property(PropertyAccess.READ, "ExecMainStatus")
    def exit_status(self) -> DBusInt32:
        return self.unit.exit_status

    @dbus_property(PropertyAccess.READ, "MainPID")
    def main_pid(self) -> DBusUInt32:
        return 77 if self.unit.active == "active" else 0

    @dbus_property(PropertyAccess.READ, "Type")
    def type(self) -> DBusStr:
        return self.unit.type

    @dbus_property(PropertyAccess.READ, "KillMode")
    def kill_mode(self) -> DBusStr:
        return self.unit.kill_mode

    @dbus_property(PropertyAccess.READ, "RemainAfterExit")
    def remains(self) -> DBusBool:
        return False

    @dbus_property(PropertyAccess.READ, "User")
    def user(self) -> DBusStr:
        return "avocado-infer"

    @dbus_property(PropertyAccess.READ, "SupplementaryGroups")
    def groups(self) -> Names:
        return ["video"]

    @dbus_property(PropertyAccess.READ, "CacheDirectory")
    def caches(self) -> Names:
        return ["avocado-pose"]

    @dbus_property(PropertyAccess.READ, "Environment")
    def environment(self) -> Names:
        return ["OPENBLAS_NUM_THREADS=1"]

    @dbus_property(PropertyAccess.READ, "NRestarts")
    def restarts(self) -> DBusUInt32:
        return self.unit.restarts


class _Unit(ServiceInterface):
    def __init__(self, unit: FakeUnit) -> None:
        super().__init__("org.freedesktop.systemd1.Unit")
        self.unit = unit

    @dbus_property(PropertyAccess.READ, "FragmentPath")
    def fragment_path(self) -> DBusStr:
        return self.unit.files[0] if self.unit.files else ""

    @dbus_property(PropertyAccess.READ, "DropInPaths")
    def drop_in_paths(self) -> Names:
        return list(self.unit.files[1:])

    @dbus_property(PropertyAccess.READ, "After")
    def after(self) -> Names:
        return list(self.unit.after)

    @dbus_property(PropertyAccess.READ, "RequiredBy")
    def required_by(self) -> Names:
        return list(self.unit.required_by)

    @dbus_property(PropertyAccess.READ, "BoundBy")
    def bound_by(self) -> Names:
        return []

    @dbus_property(PropertyAccess.READ, "ConsistsOf")
    def consists_of(self) -> Names:
        return []


class FakeSystemd(ServiceInterface):
    """The manager. `state` is /var/lib/avocado of the test, `programs` a folder for PATH."""

    def __init__(self, state: Path, programs: Path) -> None:
        super().__init__("org.freedesktop.systemd1.Manager")
        self.state = state
        self.units: dict[str, FakeUnit] = {}
        self.calls: list[tuple[str, str]] = []
        self.fail_when: Callable[[str, str], str | None] = lambda member, name: None
        self._bus: MessageBus | None = None
        self._jobs = 0
        self.state_of_all = "running"
        self.exit_status = 1  # of what fails
        programs.mkdir(exist_ok=True)
        for kind in ("sysext", "confext"):
            program = programs / f"systemd-{kind}"
            program.write_text(_PROGRAM.format(state=programs, kind=kind))
            program.chmod(0o755)
        self.programs = programs
        self.set_merged("sysext", ())
        self.set_merged("confext", ())

    async def appear(self, address: str) -> None:
        self._bus = await MessageBus(address, bus_type=BusType.SYSTEM).connect()
        self._bus.export(PATH, self)
        for unit in self.units.values():
            self._export(unit)
        await self._bus.request_name("org.freedesktop.systemd1")

    def leave(self) -> None:
        if self._bus is not None:
            self._bus.disconnect()

    def add(self, unit: FakeUnit) -> FakeUnit:
        self.units[unit.name] = unit
        self._export(unit)
        return unit

    def _export(self, unit: FakeUnit) -> None:
        if self._bus is not None:
            self._bus.export(unit.path, _Service(unit))
            self._bus.export(unit.path, _Unit(unit))

    def set_merged(self, kind: str, names: tuple[str, ...]) -> None:
        rows = [
            {"hierarchy": "/usr", "extensions": list(names) or "none", "since": 1764540000000000 if names else None}
        ]
        (self.programs / f"{kind}.json").write_text(json.dumps(rows))

    # -- the manager's interface

    @dbus_property(PropertyAccess.READ, "SystemState")
    def system_state(self) -> DBusStr:
        return self.state_of_all

    @dbus_method("Subscribe")
    def subscribe(self) -> DBusNothing:
        self.calls.append(("Subscribe", ""))

    @dbus_method("Reload")
    def reload(self) -> DBusNothing:
        self.calls.append(("Reload", ""))
        if (name := self.fail_when("Reload", "")) is not None:
            raise DBusError(name, "Refusing to reload, not enough space available on /run/systemd/.")

    @dbus_method("StartUnit")
    def start_unit(self, name: DBusStr, mode: DBusStr) -> DBusObjectPath:
        return self._job("StartUnit", self._known(name), "active")

    @dbus_method("StopUnit")
    def stop_unit(self, name: DBusStr, mode: DBusStr) -> DBusObjectPath:
        unit = self._known(name)
        for kind in ("sysext", "confext"):
            if name == f"systemd-{kind}.service":
                self.set_merged(kind, ())
        if unit.ignores_stop:
            self.calls.append(("StopUnit", name))
            self._jobs += 1
            return f"{PATH}/job/{self._jobs}"
        return self._job("StopUnit", unit, "inactive")

    @dbus_method("ThawUnit")
    def thaw_unit(self, name: DBusStr) -> DBusNothing:
        self.calls.append(("ThawUnit", name))

    @dbus_method("KillUnit")
    def kill_unit(self, name: DBusStr, whom: DBusStr, number: DBusInt32) -> DBusNothing:
        self.calls.append(("KillUnit", f"{name} {whom} {number}"))
        unit = self._known(name)
        unit.ignores_stop = unit.survives_kill

    @dbus_method("ReloadOrRestartUnit")
    def reload_or_restart_unit(self, name: DBusStr, mode: DBusStr) -> DBusObjectPath:
        unit = self._known(name)
        if self.fail_when("ReloadOrRestartUnit", name) is None:
            for kind in ("sysext", "confext"):
                if name == f"systemd-{kind}.service":
                    self.set_merged(kind, link_names(self._shown(kind)))
        return self._job("ReloadOrRestartUnit", unit, "active")

    @dbus_method("StartTransientUnit")
    def start_transient_unit(
        self, name: DBusStr, mode: DBusStr, properties: Properties, auxiliary: Auxiliary
    ) -> DBusObjectPath:
        values = {key: variant.value for key, variant in properties}
        argv = tuple(values["ExecStart"][0][1]) if "ExecStart" in values else ()
        unit = self.add(FakeUnit(name, what=values.get("What", ""), argv=argv, properties=values))
        # A command has run to its end when its job is done; a service runs on.
        reached = "inactive" if argv and values["Type"] == "oneshot" else "active"
        return self._job("StartTransientUnit", unit, reached, said=" ".join(argv) or name)

    @dbus_method("ResetFailedUnit")
    def reset_failed_unit(self, name: DBusStr) -> DBusNothing:
        if name.startswith("avocado-") and self.units.get(name, FakeUnit(name)).properties:
            gone = self.units.pop(name)  # a transient unit has no file, so nothing is left of it
            if self._bus is not None:
                self._bus.unexport(gone.path)
        elif name in self.units and self.units[name].active == "failed":
            self.units[name].active = "inactive"

    @dbus_method("ListUnitsByNames")
    def list_units_by_names(self, names: Names) -> Row:
        return [self.units.get(name, FakeUnit(name, load="not-found")).row() for name in names]

    @dbus_method("ListUnitsByPatterns")
    def list_units_by_patterns(self, states: Names, patterns: Names) -> Row:
        found = [unit for unit in self.units.values() if any(_matches(unit.name, p) for p in patterns)]
        return [unit.row() for unit in found]

    @dbus_signal("JobRemoved")
    def job_removed(
        self, number: int, path: str, name: str, result: str
    ) -> Annotated[list[Any], DBusSignature("uoss")]:
        return [number, path, name, result]

    def _known(self, name: str) -> FakeUnit:
        if name not in self.units:
            raise DBusError("org.freedesktop.systemd1.NoSuchUnit", f"Unit {name} not loaded.")
        return self.units[name]

    def _shown(self, kind: str) -> Path:
        mounts = [u.what for u in self.units.values() if u.name.endswith(f"-{kind}.mount") and u.active == "active"]
        return Path(mounts[-1]) if mounts else (self.state / "active" / kind).resolve()

    def _job(self, member: str, unit: FakeUnit, reached: str, *, said: str = "") -> str:
        self.calls.append((member, said or unit.name))
        result = self.fail_when(member, said or unit.name) or "done"
        if result == "done":
            unit.active = reached
        elif result == "failed":
            unit.active, unit.result, unit.exit_status = "failed", "exit-code", self.exit_status
        self._jobs += 1
        path = f"{PATH}/job/{self._jobs}"
        # systemd's signal may follow the reply at once; before it would be too early for any client.
        assert self._bus is not None
        self._bus._loop.call_soon(self.job_removed, self._jobs, path, unit.name, result)
        return path


def _matches(name: str, pattern: str) -> bool:
    # systemd's fnmatch takes a doubled backslash for a literal one; Python's knows no escapes.
    return fnmatchcase(name, pattern.replace("\\\\", "\\"))

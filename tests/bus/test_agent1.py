"""org.avocado.Agent1 of a running avocadod: its shape is the XML's, its errors say why, strangers are refused."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from dbus_fast import Variant

from agent.contract.errors import ErrorCode, OperationError
from agent.verbs.client import AgentClient
from tests.bus.agent_rig import CHANGE, MANAGER, NAME, PATH, TREE, Rig, address, record, rig, serving
from tests.bus.calls import calls
from tests.bus.private_bus import environment

__all__ = ["address", "rig"]

XML = TREE / "units/dbus-1/interfaces/org.avocado.Agent1.xml"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="changing a board needs root, on a test's bus too")


def shape(interface: ET.Element) -> dict[str, Any]:
    """Members with their types, whatever order or argument names introspection gives them."""
    members: dict[str, Any] = {}
    for member in interface:
        if member.tag == "property":
            members[member.attrib["name"]] = ("property", member.attrib["type"], member.attrib["access"])
        elif member.tag in ("method", "signal"):
            default = "in" if member.tag == "method" else "out"
            arguments = [(a.attrib.get("direction", default), a.attrib["type"]) for a in member.findall("arg")]
            members[member.attrib["name"]] = (member.tag, arguments)
    return members


def shapes(xml: str) -> dict[str, Any]:
    return {i.attrib["name"]: shape(i) for i in ET.fromstring(xml).findall("interface")}


def test_introspection_equals_the_interface_xml(rig: Rig) -> None:
    contract = shapes(XML.read_text())
    record(rig, 3)

    async def use() -> None:
        for path, interface in ((PATH, MANAGER), (f"{PATH}/change/3", CHANGE)):
            reply = await rig.ask("Introspect", path=path, interface="org.freedesktop.DBus.Introspectable")
            assert shapes(reply.body[0])[interface] == contract[interface]

    serving(rig, use)


REFUSALS: list[tuple[str, str, list[Any], ErrorCode, str]] = [
    ("Refresh", "a{sv}", [{}], ErrorCode.NOT_FOUND, "cannot refresh the extensions: no runtime is active"),
    (
        "Unmerge",
        "a{sv}",
        [{"await_host": Variant("b", True), "now": Variant("b", True)}],
        ErrorCode.USAGE,
        "cannot use option now: this agent does not know it",
    ),
    ("Rollback", "sa{sv}", ["", {}], ErrorCode.NOT_FOUND, "cannot roll back: this board has no previous runtime"),
    ("Activate", "sa{sv}", ["x", {}], ErrorCode.NOT_FOUND, "cannot activate runtime x: it is not on this board"),
    ("Remove", "s", ["x"], ErrorCode.NOT_FOUND, "cannot remove runtime x: it is not on this board"),
    (
        "Activate",
        "sa{sv}",
        ["x", {"force": Variant("b", True)}],
        ErrorCode.USAGE,
        "cannot use option force: this agent does not know it",
    ),
    (
        "Activate",
        "sa{sv}",
        ["x", {"warm_up": Variant("b", False)}],
        ErrorCode.NOT_FOUND,
        "cannot activate runtime x: it is not on this board",
    ),
    ("Confirm", "o", ["/x"], ErrorCode.USAGE, "cannot confirm /x: it is no change of this agent"),
    (
        "Confirm",
        "o",
        [f"{PATH}/change/7"],
        ErrorCode.NOT_FOUND,
        "cannot confirm change 7: it does not wait for a confirmation",
    ),
    ("Disable", "sa{sv}", ["x", {}], ErrorCode.NOT_FOUND, "cannot disable extension x: no runtime is active"),
    ("Enable", "sa{sv}", ["x", {}], ErrorCode.NOT_FOUND, "cannot enable extension x: no runtime is active"),
]


def test_a_request_that_is_refused_says_why_and_is_no_change(rig: Rig) -> None:
    async def use() -> None:
        for member, signature, body, code, message in REFUSALS:
            error = await rig.error(member, signature, body)
            assert (error.code, error.message) == (code, message)
        assert json.loads((await rig.ask("ListChanges", "u", [0])).body[0]) == []

    serving(rig, use)


def test_a_call_that_this_agent_does_not_know_is_no_change_that_is_gone(rig: Rig) -> None:
    async def use() -> None:
        with pytest.raises(OperationError) as caught:
            await AgentClient(rig.bus).call("Refresh")  # as an older agent had it
        assert (caught.value.code, caught.value.message, caught.value.remedy) == (
            ErrorCode.UNSUPPORTED,
            "cannot ask for Refresh: the agent that runs does not know it so",
            "Start the agent that is merged: systemctl restart avocadod",
        )

    serving(rig, use)


def test_a_caller_who_is_neither_root_nor_in_the_group_is_refused_every_call_and_property(rig: Rig) -> None:
    asked = [[c.member, c.signature, list(c.values)] for c in calls() if c.interface == MANAGER and not c.is_property]
    rig.folder.chmod(0o755)
    for parent in rig.folder.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o055)

    async def use() -> None:
        program = _AS_NOBODY.format(calls=json.dumps(asked), address=rig.address, name=NAME, path=PATH)
        command = [sys.executable, "-c", program]
        finished = await asyncio.to_thread(
            subprocess.run, command, cwd=TREE, capture_output=True, text=True, timeout=20
        )
        assert finished.returncode == 0, finished.stderr
        answers = json.loads(finished.stdout)
        assert len(answers) == len(asked) + 3
        assert set(answers.values()) == {"org.avocado.Error.NotPermitted"}

    serving(rig, use)


_AS_NOBODY = """
import asyncio, json, os
from dbus_fast import BusType, Message
from dbus_fast.aio import MessageBus
os.setgroups([]); os.setgid(65534); os.setuid(65534)
async def main():
    bus = await MessageBus("{address}", bus_type=BusType.SYSTEM).connect()
    answers = {{}}
    asked = [(m, s, b, "{name}.Manager") for m, s, b in json.loads('''{calls}''')]
    asked += [("Get", "ss", ["{name}.Manager", p], "org.freedesktop.DBus.Properties")
              for p in ("Version", "ActiveRuntime", "RunningChange")]
    for member, signature, body, interface in asked:
        reply = await bus.call(Message(destination="{name}", path="{path}", interface=interface, member=member,
                                       signature=signature, body=body))
        answers[member + str(body)] = reply.error_name
    print(json.dumps(answers))
asyncio.run(main())
"""


def test_a_change_that_is_not_there_cannot_be_cancelled_or_confirmed(rig: Rig) -> None:
    async def use() -> None:
        said = {}
        for verb in ("cancel", "confirm"):
            line = [sys.executable, "-m", "agent.cli", verb, "7"]
            run = functools.partial(subprocess.run, line, cwd=TREE, env=environment(rig.address), timeout=20)
            done = await asyncio.to_thread(run, capture_output=True, text=True, check=False)
            said[verb] = (done.returncode, done.stderr)
        assert said == {
            "cancel": (
                6,
                "avocadoctl: cannot find that change: it neither runs nor is the one that ran last\n"
                "  try: See which there are: avocadoctl history\n",
            ),
            "confirm": (
                6,
                "avocadoctl: cannot confirm change 7: it does not wait for a confirmation\n"
                "  try: See how it stands: avocadoctl history show 7\n",
            ),
        }

    serving(rig, use)

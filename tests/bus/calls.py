"""Every call the agent's interface XML allows, and who may make it. A method added there appears here by itself.

Reading is listed; whatever is not listed changes the board, and is root's.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

XML = Path(__file__).resolve().parents[2] / "units/dbus-1/interfaces/org.avocado.Agent1.xml"
NAME = "org.avocado.Agent1"
PATH = "/org/avocado/Agent1"
READING = {"Manager.Describe", "Manager.ListChanges", "Change.Describe"}

# A value of each type that methods take, in D-Bus and as busctl writes it.
_VALUES: dict[str, tuple[object, list[str]]] = {
    "s": ("x", ["x"]),
    "o": ("/x", ["/x"]),
    "u": (1, ["1"]),
    "a{sv}": ({}, ["0"]),
}


@dataclass(frozen=True, slots=True)
class Call:
    """One method, or one property that is read."""

    interface: str
    member: str
    signature: str = ""
    values: tuple[object, ...] = ()
    words: tuple[str, ...] = ()
    is_property: bool = False

    @property
    def name(self) -> str:
        """As the table has it: `Manager.Deploy`."""
        return f"{self.interface.rpartition('.')[2]}.{self.member}"

    @property
    def reads(self) -> bool:
        """Whether the group avocado may."""
        return self.is_property or self.name in READING


def calls() -> list[Call]:
    """Every call, in the order of the XML."""
    found: list[Call] = []
    for interface in ET.parse(XML).getroot().findall("interface"):
        name = interface.attrib["name"]
        for member in interface:
            if member.tag == "property":
                assert member.attrib["access"] == "read", "nothing is changed by setting a property"
                found.append(Call(name, member.attrib["name"], is_property=True))
            elif member.tag == "method":
                types = [arg.attrib["type"] for arg in member.findall("arg") if arg.attrib["direction"] == "in"]
                values = [_VALUES[kind] for kind in types]
                words = tuple(word for _, part in values for word in part)
                found.append(
                    Call(name, member.attrib["name"], "".join(types), tuple(value for value, _ in values), words)
                )
    return found


def table() -> list[str]:
    """The table of docs/threat-model.md."""
    rows = ["| call | root | group avocado | others |", "| --- | --- | --- | --- |"]
    for call in calls():
        kind = " (property)" if call.is_property else ""
        rows.append(f"| {call.name}{kind} | may | {'may' if call.reads else 'refused'} | refused |")
    return rows

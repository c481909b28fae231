"""Who calls, and whether they may: root changes the board, and whom polkit lets; root and the group avocado read it.

The bus is asked for the caller's credentials at every call, so that a policy file which was edited or lost opens
nothing. The sender reaches the check through a context variable that is set before the method's task is made.
"""

from __future__ import annotations

import grp
import pwd
from contextvars import ContextVar
from typing import Any

from dbus_fast import Message, MessageType
from dbus_fast.aio import MessageBus

from agent.contract.errors import ErrorCode, OperationError
from agent.ports.peer import BUS_NAME, BUS_PATH, PeerError, call
from agent.ports.polkit import ACTION, may_change

GROUP = "avocado"

_CALL_TIMEOUT_S = 5.0
_sender: ContextVar[str] = ContextVar("sender", default="")


class Gate:
    """Who may do what, by the caller's credentials."""

    def __init__(self, bus: MessageBus) -> None:
        self._bus = bus
        # Runs before the method, in the context its task copies.
        bus.add_message_handler(_note_sender)

    async def reader(self) -> None:
        """Root, or a member of the group avocado. Raises `not-permitted`."""
        if not _sender.get():
            return  # nobody called: the library reads the properties for a signal of its own
        credentials = await self._credentials()
        if credentials["UnixUserID"] != 0 and not _is_member(credentials):
            raise _forbidden("read the agent's state", f"Run it as root or as a member of the group {GROUP}.")

    async def changer(self) -> str:
        """Root, or whom a rule of polkit's lets; gives the name of who asks. Raises `not-permitted`."""
        user = (await self._credentials())["UnixUserID"]
        if user == 0:
            return "root"
        if not await may_change(self._bus, _sender.get()):
            raise _forbidden("change this board", f"Run it as root, or let polkit allow {ACTION}.")
        return _name_of(user)

    async def _credentials(self) -> dict[str, Any]:
        sender = _sender.get()
        question = Message(
            destination=BUS_NAME,
            path=BUS_PATH,
            interface=BUS_NAME,
            member="GetConnectionCredentials",
            signature="s",
            body=[sender],
        )
        try:
            reply = await call(self._bus, question, _CALL_TIMEOUT_S)
        except PeerError as cause:  # it hung up meanwhile
            raise _forbidden("tell who is asking", "") from cause
        values = {name: variant.value for name, variant in reply[0].items()}
        if "UnixUserID" not in values:
            raise _forbidden("tell who is asking", "")
        return values


def _name_of(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"


def _note_sender(message: Message) -> None:
    if message.message_type is MessageType.METHOD_CALL:
        _sender.set(message.sender or "")


def _is_member(credentials: dict[str, Any]) -> bool:
    try:
        group = grp.getgrnam(GROUP)
        user = pwd.getpwuid(credentials["UnixUserID"])
    except KeyError:
        return False
    # Older bus daemons do not list the groups.
    groups = credentials.get("UnixGroupIDs", [])
    return group.gr_gid in groups or user.pw_gid == group.gr_gid or user.pw_name in group.gr_mem


def _forbidden(what: str, remedy: str) -> OperationError:
    return OperationError(ErrorCode.NOT_PERMITTED, f"cannot {what}: not permitted", remedy)

"""org.freedesktop.PolicyKit1: whether an administrator's rule lets somebody else than root change the board.

Root is never asked about, so polkit can neither lock root out nor hold a change up. Without polkit, without an answer
in time, or with any answer but a plain yes, nobody else may.
"""

from __future__ import annotations

import logging

from dbus_fast import Message, Variant
from dbus_fast.aio import MessageBus

from agent.contract.errors import OperationError
from agent.ports.peer import PeerError, call

ACTION = "org.avocado.agent1.change"
# It may have to be started first; a rule that takes longer is no answer.
TIMEOUT_S = 5.0
_NOBODY_IS_ASKED = 0
_LOG = logging.getLogger("avocado.polkit")


async def may_change(bus: MessageBus, sender: str) -> bool:
    """Whether polkit says yes to the caller of that bus name."""
    question = Message(
        destination="org.freedesktop.PolicyKit1",
        path="/org/freedesktop/PolicyKit1/Authority",
        interface="org.freedesktop.PolicyKit1.Authority",
        member="CheckAuthorization",
        signature="(sa{sv})sa{ss}us",
        body=[["system-bus-name", {"name": Variant("s", sender)}], ACTION, {}, _NOBODY_IS_ASKED, ""],
    )
    try:
        reply = await call(bus, question, TIMEOUT_S)
    except (PeerError, OperationError) as cause:
        _LOG.info("polkit does not say that %s may change this board: %s", sender, cause)
        return False
    found = reply[0] if reply else None  # authorized, challenge, details
    return isinstance(found, (list, tuple)) and len(found) == 3 and found[0] is True

"""`avocado-infer inject MODE`: give the simulated NPU a fault and watch the service get over it.

Asks the running service over the bus (root only). A fault that takes the NPU away is taken back as soon as the switch
to the CPU was seen, so that the NPU can come back and both switches can be printed; `--keep` leaves it in place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

from dbus_fast import BusType, DBusError, Message, MessageType
from dbus_fast.aio import MessageBus

from inference.bus import NAME, PATH
from inference.errors import InferenceError
from inference.injection import MODES

_CALL_TIMEOUT_S = 10.0


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `inject` to the command line."""
    parser = subparsers.add_parser(
        "inject",
        help="make the simulated NPU misbehave",
        description="Give the simulated NPU a fault, and print how the service gets over it.",
    )
    parser.add_argument("mode", metavar="MODE", help=f"{', '.join(MODES)}; or slow:MILLISECONDS")
    parser.add_argument("--keep", action="store_true", help="leave the fault in place (end it with `inject ok`)")
    parser.add_argument("--wait", type=float, default=30.0, metavar="S", help="how long to watch (default: 30)")


def run(arguments: argparse.Namespace) -> int:
    """Inject and watch; 0 when the NPU is back (or the fault was to be kept), 1 when it is not."""
    return asyncio.run(_inject(arguments.mode, keep=arguments.keep, wait_s=arguments.wait))


async def _inject(mode: str, *, keep: bool, wait_s: float) -> int:
    try:
        bus = await MessageBus(bus_type=BusType.SYSTEM).connect()
    except (OSError, DBusError) as error:
        raise InferenceError(f"cannot reach the system bus: {error}", "run this on the board, as root") from error
    try:
        return await _watch(bus, mode, keep=keep, wait_s=wait_s)
    finally:
        bus.disconnect()


async def _watch(bus: MessageBus, mode: str, *, keep: bool, wait_s: float) -> int:
    switches: asyncio.Queue[list[str]] = asyncio.Queue()

    def take(message: Message) -> None:
        if message.message_type is MessageType.SIGNAL and message.member == "BackendChanged":
            switches.put_nowait(message.body)

    bus.add_message_handler(take)
    rule = f"type='signal',interface='{NAME}',path='{PATH}',member='BackendChanged'"
    # Subscribed before the fault: a switch takes milliseconds.
    await _call(bus, "org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus", "AddMatch", rule)
    began = time.monotonic()
    await _call(bus, NAME, PATH, NAME, "Inject", mode)
    print(f"injected {mode}")
    if mode == "ok" or keep:
        return 0
    status = 1
    cleared = False
    try:
        async with asyncio.timeout(wait_s):
            while status:
                before, after, reason = await switches.get()
                print(f"{(time.monotonic() - began) * 1000:7.0f} ms  {before} -> {after}: {reason}", flush=True)
                if not cleared and after != "npu":
                    await _call(bus, NAME, PATH, NAME, "Inject", "ok")
                    cleared = True
                elif cleared and after == "npu":
                    status = 0
    except TimeoutError:
        print(f"no {'return to the NPU' if cleared else 'switch away from the NPU'} within {wait_s:.0f} s")
    finally:
        if not cleared:
            await _call(bus, NAME, PATH, NAME, "Inject", "ok")
    return status


async def _call(bus: MessageBus, destination: str, path: str, interface: str, member: str, argument: str) -> Any:
    message = Message(
        destination=destination, path=path, interface=interface, member=member, signature="s", body=[argument]
    )
    try:
        reply = await asyncio.wait_for(bus.call(message), _CALL_TIMEOUT_S)
    except TimeoutError:
        raise InferenceError(f"cannot call {member}: {destination} does not answer") from None
    if reply is None or reply.message_type is MessageType.ERROR:
        raise _explain(member, reply)
    return reply.body


def _explain(member: str, reply: Message | None) -> InferenceError:
    text = str(reply.body[0]) if reply is not None and reply.body else ""
    name = reply.error_name if reply is not None else ""
    if name == "org.freedesktop.DBus.Error.ServiceUnknown":
        return InferenceError("cannot inject a fault: the pose service is not running", "systemctl start pose.service")
    if name == "org.freedesktop.DBus.Error.AccessDenied":
        return InferenceError("cannot inject a fault: only root may", "run this as root")
    try:
        document = json.loads(text)
        return InferenceError(str(document["message"]), str(document["remedy"]))
    except (ValueError, TypeError, KeyError):
        return InferenceError(f"cannot call {member}: {name} {text}")

"""The board's end of a deploy: one HTTP connection between ssh's standard streams and the agent.

Promises that nothing but HTTP reaches the wire after the marker (the streams are taken away before anything else could
print), that only root reaches the socket, that one connection is served and no second, and that it ends by itself: when
the change has ended, or when the host is gone. A change whose host is gone follows its own rules; one whose agent is
killed loses its wire and is followed to the end that the agent's next start gives it. `deploy` runs this; a person has
no use for it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbus_fast import Variant

from agent.contract.bridge import MARKER, event_line
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.status import RUN_DIR, progress_of
from agent.verbs.client import AgentClient, Record, options_for
from agent.verbs.options import add_warm_up

_CHUNK_BYTES = 1 << 18
_PLAN_TIMEOUT_S = 600.0
_EVENT_EVERY_S = 0.1


def register(subparsers: Any) -> None:
    """Add the verb's parser."""
    parser = subparsers.add_parser(
        "receive",
        help="the board's end of a deploy; run by deploy itself",
        description="Carries a signed repository from the host to the agent over standard input and output.",
    )
    parser.add_argument("--dry-run", action="store_true", help="make the plan and change nothing")
    add_warm_up(parser)
    parser.add_argument("--requested-by", default="deploy", metavar="WHO", help="noted in the change's record")
    parser.add_argument("--run-dir", type=Path, default=RUN_DIR, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry one deploy from its marker to its result."""
    if os.isatty(0) or os.isatty(1):
        raise OperationError(
            ErrorCode.USAGE,
            "cannot receive on a terminal: it would change bytes",
            "Run `avocadoctl -H root@board deploy` on the host; it uses ssh without a terminal.",
        )
    wire = _take_streams()
    try:
        bridge = Bridge.open(args.run_dir, wire)
    except OperationError as error:
        _tell(_result(error=error))
        return error.exit_status
    try:
        options = {
            "dry_run": Variant("b", args.dry_run),
            "requested_by": Variant("s", args.requested_by),
            **options_for(warm_up=args.warm_up),
        }
        return asyncio.run(_receive(bridge, options))
    finally:
        bridge.close()


@dataclass(frozen=True, slots=True)
class Wire:
    """ssh's standard streams, out of everybody else's reach."""

    from_host: int
    to_host: int


def _take_streams() -> Wire:
    """Move the streams away: what any code prints from now on goes to standard error."""
    wire = Wire(os.dup(0), os.dup(1))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return wire


class Bridge:
    """A listening socket for the agent, and two pumps to and from the host."""

    def __init__(self, path: Path, listener: socket.socket, wire: Wire) -> None:
        self.path = path
        self._listener = listener
        self._wire = wire
        self._taken = threading.Lock()
        self.host_gone = threading.Event()

    @classmethod
    def open(cls, run_dir: Path, wire: Wire) -> Bridge:
        """Listen, then write the marker. Raises `agent-unreachable` or `not-permitted`."""
        path = run_dir / f"receive-{os.getpid()}.sock"
        listener = socket.socket(socket.AF_UNIX)
        old_mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        except PermissionError as cause:
            raise OperationError(
                ErrorCode.NOT_PERMITTED, f"cannot receive: no right to {run_dir}", "Deploy as root: -H root@board"
            ) from cause
        except OSError as cause:
            raise OperationError(
                ErrorCode.AGENT_UNREACHABLE,
                f"cannot receive: {run_dir}: {cause.strerror}",
                "See why the agent does not run: systemctl status avocadod",
            ) from cause
        finally:
            os.umask(old_mask)
        listener.listen(1)
        bridge = cls(path, listener, wire)
        os.write(wire.to_host, MARKER)
        threading.Thread(target=bridge._serve, daemon=True).start()
        return bridge

    def close(self) -> None:
        """The socket is gone; the pumps are daemon threads and end with the process."""
        self._listener.close()
        with contextlib.suppress(OSError):  # the next boot removes it; how the change ended must still be told
            self.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        try:
            agent, _ = self._listener.accept()
        except OSError:
            return  # closed before the agent came
        threading.Thread(target=self._to_host, args=(agent,), daemon=True).start()
        self._from_host(agent)

    def _to_host(self, agent: socket.socket) -> None:
        with contextlib.suppress(OSError):  # an agent that was killed is not a host that is gone
            while data := agent.recv(_CHUNK_BYTES):
                view = memoryview(data)
                try:
                    while view:
                        view = view[os.write(self._wire.to_host, view) :]
                except OSError:
                    self.host_gone.set()
                    return

    def _from_host(self, agent: socket.socket) -> None:
        agent_is_gone = False
        with contextlib.suppress(OSError):  # of the host's end
            while data := os.read(self._wire.from_host, _CHUNK_BYTES):
                try:
                    if not agent_is_gone:
                        agent.sendall(data)
                except OSError:
                    # It hung up, and the change says why. The host is listened to until it goes as well.
                    agent_is_gone = True
        self.host_gone.set()
        agent.close()


async def _receive(bridge: Bridge, options: dict[str, Variant]) -> int:
    change = asyncio.create_task(_change(bridge, options))
    while not change.done() and not bridge.host_gone.is_set():
        await asyncio.wait({change}, timeout=_EVENT_EVERY_S)
    if not change.done():
        change.cancel()
        return int(OperationError(ErrorCode.SSH_FAILED, "").exit_status)
    try:
        record = change.result()
    except OperationError as error:
        _tell(_result(error=error))
        return error.exit_status
    _tell(_result(record=record))
    return 0


async def _change(bridge: Bridge, options: dict[str, Variant]) -> Record:
    client = await AgentClient.connect()
    try:
        await client.subscribe()
        body = [f"unix:{bridge.path}", options]
        path = (await client.call("Deploy", "sa{sv}", body, timeout_s=_PLAN_TIMEOUT_S))[0]
        return await client.follow(path, _progress_teller())
    finally:
        client.close()


def _progress_teller() -> Callable[[Record], None]:
    """A function that tells every new step at once, and what moves within one every moment."""
    last = ("", 0.0)

    def tell(record: Record) -> None:
        nonlocal last
        event, now = _progress(record), time.monotonic()
        # An agent that signals every block must not flood the wire.
        if event["text"] != last[0] or now - last[1] >= _EVENT_EVERY_S:
            last = (event["text"], now)
            _tell(event)

    return lambda record: tell(record) if record["outcome"] == "running" else None


def _progress(record: Record) -> dict[str, Any]:
    percent, text = progress_of(record)
    moving = [step for step in record["steps"] if step["phase"] in ("doing", "undoing")]
    return {
        "event": "progress",
        "change": record["number"],
        "step": moving[-1]["kind"] if moving else "",
        "undoing": bool(moving) and moving[-1]["phase"] == "undoing",
        "text": text,
        "percent": percent,
        "bytes_done": int(record["facts"].get("bytes_done", 0)),
        "bytes_total": int(record["facts"].get("bytes_total", 0)),
    }


def _result(*, record: Record | None = None, error: OperationError | None = None) -> dict[str, Any]:
    return {"event": "result", "change": record, "error": error.as_dict() if error else None}


def _tell(event: dict[str, Any]) -> None:
    try:
        sys.stderr.buffer.write(event_line(event))
        sys.stderr.buffer.flush()
    except OSError:
        return  # nobody listens any more; the change follows its own rules

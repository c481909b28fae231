"""Keeps `/run/avocado/status.json` true: written again at every change, and every few seconds without one.

The file is replaced in one rename, so that a reader never sees half of it, and carries when it was written, so that a
reader can tell a dead agent's last words. It is readable by the group avocado only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from agent.contract.disk import disk_error
from agent.contract.errors import OperationError
from agent.contract.status import FILE_NAME, SILENT, StatusDocument, boottime_s

# Progress comes many times a second; looking at the whole board that often would cost more than it tells.
_LEAST_PAUSE_S = 0.25
_LOG = logging.getLogger("avocado.status")

Gather = Callable[[Mapping[str, Any] | None], StatusDocument]


class StatusKeeper:
    """Gathers and publishes. `gather` is called in a thread, since it asks ports that wait."""

    def __init__(
        self,
        gather: Gather,
        ask_inference: Callable[[], Awaitable[Mapping[str, Any] | None]],
        run_dir: Path,
        interval_s: float,
    ) -> None:
        self._gather = gather
        self._ask_inference = ask_inference
        self._path = run_dir / FILE_NAME
        self._interval_s = interval_s
        self._wanted = asyncio.Event()
        self._gathering = asyncio.Lock()
        self._warned = ""
        self._last_seen: Mapping[str, Any] | None = None  # the pose service's last answer, and when it came

    def touch(self) -> None:
        """Something has changed."""
        self._wanted.set()

    async def refresh(self) -> StatusDocument:
        """Gather now, write the file, and give the document."""
        async with self._gathering:
            self._wanted.clear()
            inference = await self._inference()
            document = await asyncio.to_thread(self._gather, inference)
            try:
                write_status(self._path, document)
            except OSError as error:
                # The file then grows old and readers say so; whoever asks on the bus has the answer.
                self._warn(disk_error(self._path, error))
            else:
                self._warned = ""
            return document

    def _warn(self, error: OperationError | OSError) -> None:
        if str(error) != self._warned:
            _LOG.warning("cannot publish the status: %s", error)
        self._warned = str(error)

    async def _inference(self) -> Mapping[str, Any] | None:
        try:
            inference = await self._ask_inference()
        except OperationError as error:
            said = {"state": SILENT, "backend": "none", "reason": "no answer", "message": error.message}
            return said | {"last_seen": self._last_seen}
        if inference is not None:
            self._last_seen = {**inference, "seen_boottime_s": round(boottime_s(), 3)}
        return inference

    async def keep(self) -> None:
        """Publish for as long as the daemon runs."""
        while True:
            try:
                await self.refresh()
            except (OperationError, OSError) as error:
                # A change at work must not end for it.
                self._warn(error)
            await asyncio.sleep(_LEAST_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), self._interval_s)


def write_status(path: Path, document: StatusDocument) -> None:
    """Replace the file: root and the group of its folder may read it. Not synced, since it ends with the boot."""
    temporary = path.with_name(f".{path.name}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        os.fchmod(descriptor, 0o640)
        json.dump(document, stream)
    temporary.rename(path)


def said_to_run(status: StatusDocument, active: str | None) -> str:
    """What the board runs, in the words of the status document, for who reads the journal."""
    runtime = status["runtime"]
    if active is None:
        return "no runtime is active"
    merged = ", ".join(f"{one['name']} {one['version']}" for one in status["extensions"] if one["isMerged"])
    name = f"{runtime['name']} {runtime['version']}" if runtime else "its manifest cannot be read"
    return f"runtime {active} ({name}), merged: {merged or 'nothing'}"

"""A worker that SIGKILL does not end, for real: `python -m tests.inference.unkillable FOLDER` in a mount namespace.

The NPU's node lies on a FUSE file system that this program serves and, on demand, does not answer. A process whose
request was already read waits for the answer uninterruptibly, as in a driver that waits for dead hardware. Prints what
the supervisor did as JSON. With the program's end the file system and the namespace go away.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import os
import signal
import stat
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

from inference.link import SupervisorLink
from inference.policy import Backend, Phase, Reason
from tests.inference.rig import WAIT_S, Camera, Rig, marked_processes

IN_HEADER = struct.Struct("<IIQQIIII")
OUT_HEADER = struct.Struct("<IiQ")
LOOKUP, FORGET, INIT = 1, 2, 26
ENTRY = struct.Struct("<QQQQII" + "QQQQQQ" + "IIIIIIIIII")


class StallingFiles:
    """A FUSE mount with one file, whose lookups are answered unless `stalled`."""

    def __init__(self, folder: Path) -> None:
        self.stalled = False
        self._held: list[int] = []
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0".encode()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"stalling", bytes(folder), b"fuse", 0, options) != 0:
            raise OSError(ctypes.get_errno(), "mount fuse")
        threading.Thread(target=self._serve, daemon=True).start()

    def resume(self) -> None:
        """Answer what was held back."""
        self.stalled = False
        held, self._held = self._held, []
        for unique in held:
            self._reply(unique, b"", -errno.ENOENT)

    def _serve(self) -> None:
        while True:
            raw = os.read(self._device, 1 << 17)
            _, opcode, unique, *_ = IN_HEADER.unpack_from(raw)
            if opcode == INIT:
                self._reply(unique, struct.pack("<IIIIHHII", 7, 31, 0, 0, 8, 8, 1 << 16, 1) + bytes(36))
            elif opcode == LOOKUP and self.stalled:
                self._held.append(unique)
            elif opcode == LOOKUP:
                mode = stat.S_IFREG | 0o600
                self._reply(unique, ENTRY.pack(2, 0, 0, 10, 0, 0, 2, *[0] * 5, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0))
            elif opcode != FORGET:
                self._reply(unique, b"", -errno.ENOSYS)

    def _reply(self, unique: int, body: bytes, error: int = 0) -> None:
        os.write(self._device, OUT_HEADER.pack(OUT_HEADER.size + len(body), error, unique) + body)


async def scenario(folder: Path) -> dict[str, Any]:
    """Hang the worker in the kernel, watch, let it go."""
    mount = folder / "dev"
    mount.mkdir()
    files = StallingFiles(mount)
    rig = Rig(folder)
    rig.node.touch()
    rig.inject("ok")
    settings = rig.settings(nodes=[str(mount / "simnpu0")], deadlines={"create_s": 0.5}, recovery={"reap_s": 0.3})
    link = await SupervisorLink.start(settings)
    try:
        camera = Camera(link)
        await link.wait_serving(WAIT_S, backend=Backend.NPU)
        files.stalled = True
        os.kill(link.state.workers["npu"], signal.SIGKILL)
        await camera.until(lambda answer: answer.reason is Reason.QUARANTINED)
        restarts = link.state.restarts
        until = time.monotonic() + 0.7
        await camera.until(lambda _: time.monotonic() > until)
        seen = {
            "backend": link.state.backend,
            "quarantined": link.state.phase is Phase.QUARANTINED,
            "stuck": [state for state in marked_processes().values() if state == "D"],
            "more_workers": link.state.restarts - restarts,
        }
        files.resume()
        since = time.monotonic()
        await camera.until(lambda answer: answer.backend is Backend.NPU)
        return {
            **seen,
            "back": link.state.phase,
            "back_ms": (time.monotonic() - since) * 1000,
            "frames": len(camera.answers),
            "worst_ms": max(answer.latency_ms for answer in camera.answers),
            "least_oks": min(camera.oks(answer) for answer in camera.answers),
        }
    finally:
        files.resume()
        await link.close()


if __name__ == "__main__":
    print(json.dumps(asyncio.run(scenario(Path(sys.argv[1])))))

"""A headless Chromium driven over its debugging protocol, because a page with an MJPEG stream never ends loading.

    python -m tests.inference.browser http://127.0.0.1:8080/ page.png

takes one picture after a few seconds. What the page printed to its console is returned beside it: a page that works
prints nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.complaints: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the debugging protocol."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        async with asyncio.timeout(20):
            while True:
                message = await self._socket.receive_json()
                if message.get("id") == self._number:
                    return message.get("result", message)
                if message.get("method") in {"Runtime.exceptionThrown", "Log.entryAdded"}:
                    self.complaints.append(str(message["params"]))

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        return (await self.call("Runtime.evaluate", expression=expression, returnByValue=True))["result"].get("value")

    async def wait_for(self, expression: str, timeout_s: float) -> None:
        """Wait until the expression is true."""
        async with asyncio.timeout(timeout_s):
            while not await self.evaluate(expression):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def picture(self, path: Path) -> None:
        """Write what the tab shows as PNG."""
        answer = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))


@asynccontextmanager
async def open_page(url: str, width: int = 1360, height: int = 820) -> AsyncIterator[Page]:
    """Chromium with one tab at `url`, ended with everything it started."""
    program = shutil.which("chromium")
    if program is None:
        raise FileNotFoundError("chromium")
    with tempfile.TemporaryDirectory(prefix="page-", ignore_cleanup_errors=True) as folder:
        process = await asyncio.create_subprocess_exec(
            program,
            *_FLAGS,
            f"--user-data-dir={folder}",
            f"--window-size={width},{height}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            port = await _debugging_port(process)
            async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/json") as answer:
                tab = next(entry for entry in await answer.json() if entry["type"] == "page")
                async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=64 << 20) as socket:
                    page = Page(socket)
                    for domain in ("Runtime", "Log", "Page"):
                        await page.call(f"{domain}.enable")
                    await page.call(
                        "Emulation.setDeviceMetricsOverride",
                        width=width,
                        height=height,
                        deviceScaleFactor=1,
                        mobile=False,
                    )
                    await page.call("Page.navigate", url=url)
                    yield page
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()


async def _debugging_port(process: asyncio.subprocess.Process) -> int:
    assert process.stderr is not None
    async with asyncio.timeout(30):
        while line := await process.stderr.readline():
            if found := re.search(rb"DevTools listening on ws://127\.0\.0\.1:(\d+)/", line):
                return int(found[1])
    raise RuntimeError("chromium ended before it listened")


async def _take(url: str, path: Path, wait_s: float, size: tuple[int, int]) -> None:
    async with open_page(url, *size) as page:
        await asyncio.sleep(wait_s)
        await page.picture(path)
        for complaint in page.complaints:
            print(complaint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Take a picture of a page.")
    parser.add_argument("url")
    parser.add_argument("path", type=Path)
    parser.add_argument("--wait", type=float, default=4.0)
    parser.add_argument("--size", type=int, nargs=2, default=(1360, 820))
    words = parser.parse_args()
    asyncio.run(_take(words.url, words.path, words.wait, tuple(words.size)))

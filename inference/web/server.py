"""The page's routes, and the encoder that works only while somebody looks.

    /            the page          /api/status  the state, one JSON document
    /stream      MJPEG             /api/poses   every pose as a server-sent event
    /metrics     Prometheus text   /healthz     200 while frames are answered, otherwise 503

A viewer that reads slowly loses pictures; one that does not read at all for ten seconds is cut off. Neither slows the
frame loop. Poses carry `skipped`, the number of events that a slow reader missed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from inference import metrics
from inference.drawing import annotate
from inference.errors import InferenceError
from inference.status import Sample, State
from inference.web.fanout import Fanout, TooManyReadersError
from inference.web.guard import add_headers, guard

_HERE = Path(__file__).parent
_ASSETS = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
_BOUNDARY = "frame"
_WRITE_TIMEOUT_S = 10.0
_KEEPALIVE_S = 5.0
_STREAM_PLACES = 16
_POSE_PLACES = 32
_POSE_DEPTH = 64


class PoseWeb:
    """The web application of one service."""

    def __init__(self, describe: Callable[[], Mapping[str, Any]], jpeg_quality: int, token: str | None) -> None:
        self._describe = describe
        self._jpeg_quality = jpeg_quality
        self._newest: Sample | None = None
        self._fresh = asyncio.Event()
        self._pictures: Fanout[bytes] = Fanout(depth=1, places=_STREAM_PLACES)
        self._poses: Fanout[bytes] = Fanout(depth=_POSE_DEPTH, places=_POSE_PLACES)
        self.app = web.Application(middlewares=[guard(token)])
        self.app.on_response_prepare.append(add_headers)
        routes = {
            "/stream": self._stream,
            "/api/status": self._status,
            "/api/poses": self._events,
            "/metrics": self._metrics,
            "/healthz": self._health,
            **dict.fromkeys(_ASSETS, self._asset),
        }
        self.app.add_routes([web.get(path, handler) for path, handler in routes.items()])

    async def serve(self, host: str, port: int) -> web.AppRunner:
        """Listen; the caller closes the runner that is returned. InferenceError when the address is taken."""
        runner = web.AppRunner(self.app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            await runner.cleanup()
            raise InferenceError(
                f"cannot listen on {host}:{port}: {error.strerror}",
                "end the other program there, or set web.listen in /etc/avocado/pose.toml",
            ) from error
        return runner

    def publish(self, sample: Sample) -> None:
        """Show a frame to whoever looks; costs next to nothing when nobody does."""
        if len(self._poses):
            self._poses.publish(_pose_event(sample))
        self._newest = sample
        self._fresh.set()

    def close(self) -> None:
        """End every open stream."""
        self._pictures.close()
        self._poses.close()

    async def encode(self) -> None:
        """Draw and encode the newest frame, in a thread, as long as there are viewers; until cancelled."""
        while True:
            await self._fresh.wait()
            self._fresh.clear()
            sample = self._newest
            if sample is None or not len(self._pictures):
                continue
            jpeg = await asyncio.to_thread(annotate, sample, self._jpeg_quality)
            self._pictures.publish(jpeg)

    async def _asset(self, request: web.Request) -> web.StreamResponse:
        name, content_type = _ASSETS[request.path]
        body = (_HERE / name).read_bytes()
        return web.Response(body=body, content_type=content_type, charset="utf-8")

    async def _status(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response(self._describe())

    async def _metrics(self, _request: web.Request) -> web.StreamResponse:
        text = metrics.render(self._describe(), len(self._pictures))
        return web.Response(body=text.encode(), headers={"Content-Type": metrics.CONTENT_TYPE})

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        state = self._describe()["state"]
        well = state in {State.SERVING, State.DEGRADED}
        return web.Response(status=200 if well else 503, text=f"{state}\n")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": f"multipart/x-mixed-replace; boundary={_BOUNDARY}"})
        try:
            with self._pictures.reader() as reader:
                await response.prepare(request)
                await response.write(f"--{_BOUNDARY}\r\n".encode())
                # The last frame at once: a viewer of a stopped camera sees where it stopped.
                if self._newest is not None:
                    reader.put(await asyncio.to_thread(annotate, self._newest, self._jpeg_quality))
                while (jpeg := await reader.next()) is not None:
                    head = f"Content-Type: image/jpeg\r\nContent-Length: {len(jpeg)}\r\n\r\n".encode()
                    # The boundary that ends a part is what makes a browser show it.
                    await _write(response, head + jpeg + f"\r\n--{_BOUNDARY}\r\n".encode())
        except TooManyReadersError:
            raise web.HTTPServiceUnavailable(text="too many viewers\n") from None
        except (ConnectionError, TimeoutError):
            _cut_off(request)
        return response

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            with self._poses.reader() as reader:
                await response.prepare(request)
                told = 0
                await _write(response, b"retry: 1000\n\n")
                while True:
                    try:
                        entry = await asyncio.wait_for(reader.next(), _KEEPALIVE_S)
                    except TimeoutError:
                        # Finds a reader that has gone while no frames come.
                        await _write(response, b": no frames\n\n")
                        continue
                    if entry is None:
                        break
                    if reader.skipped != told:
                        told = reader.skipped
                        await _write(response, f'event: skipped\ndata: {{"skipped":{told}}}\n\n'.encode())
                    await _write(response, entry)
        except TooManyReadersError:
            raise web.HTTPServiceUnavailable(text="too many readers\n") from None
        except (ConnectionError, TimeoutError):
            _cut_off(request)
        return response


async def _write(response: web.StreamResponse, data: bytes) -> None:
    await asyncio.wait_for(response.write(data), _WRITE_TIMEOUT_S)


def _cut_off(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def _pose_event(sample: Sample) -> bytes:
    height, width = sample.image.shape[:2]
    document = {
        "t": round(sample.answered_at * 1000, 3),
        "seq": sample.sequence,
        "backend": sample.backend.value,
        "reason": sample.reason.value,
        "fell_back": sample.fell_back,
        "points": [[round(float(x), 1), round(float(y), 1), round(float(score), 3)] for y, x, score in sample.points],
        "frame": [width, height],
        "latency_ms": round(sample.latency_ms, 3),
    }
    return f"data: {json.dumps(document, separators=(',', ':'))}\n\n".encode()

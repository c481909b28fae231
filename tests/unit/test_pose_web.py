"""The page's server: who may talk to it, and that a reader who sleeps costs nobody anything."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from inference.config import ConfigError
from inference.errors import InferenceError
from inference.policy import Backend, Reason
from inference.status import Sample
from inference.web.fanout import Fanout, TooManyReadersError
from inference.web.guard import read_token
from inference.web.server import PoseWeb

TOKEN = "0123456789abcdef-token"
DOCUMENT: dict[str, Any] = {
    "state": "serving",
    "backend": "npu",
    "model": {"name": 'a"b', "version": "1"},
    "accelerator": {"name": "virtual"},
    "frames": 3,
    "unanswered": 0,
    "fallbacks": 1,
    "restarts": 1,
    "camera": {"connected": True, "overwritten": 0, "damaged": 0},
    "latency_ms": {"p50": 5.0, "p95": 6.0, "p99": 7.0},
    "fps": 30.0,
}


def sample(sequence: int, backend: Backend = Backend.NPU) -> Sample:
    points = np.full((17, 3), 0.9, np.float32)
    points[:, 0] = np.linspace(5, 40, 17)
    points[:, 1] = np.linspace(5, 60, 17)
    image = np.zeros((48, 64, 3), np.uint8)
    return Sample(sequence, image, points, backend, Reason.OK, False, 5.25, time.monotonic())


def browse(
    scenario: Callable[[TestClient[Any, Any], PoseWeb], Awaitable[None]],
    token: str | None = None,
    document: dict[str, Any] = DOCUMENT,
) -> None:
    async def go() -> None:
        page = PoseWeb(lambda: document, 80, token)
        encoding = asyncio.create_task(page.encode())
        async with asyncio.timeout(10), TestClient(TestServer(page.app)) as client:
            await scenario(client, page)
            page.close()
        encoding.cancel()

    asyncio.run(go())


def test_the_page_and_its_parts_come_with_headers_that_keep_other_sites_out() -> None:
    async def scenario(client: TestClient[Any, Any], _page: PoseWeb) -> None:
        for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
            answer = await client.get(path)
            assert (answer.status, answer.content_type) == (200, kind)
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")
            assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"

    browse(scenario)


def test_the_page_loads_nothing_from_elsewhere() -> None:
    folder = Path(__file__).parents[2] / "inference" / "web"
    for name in ("page.html", "page.css", "page.js"):
        assert "//" not in (folder / name).read_text().replace("// ", "").replace('"//"', ""), name


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "[::1"])
def test_a_rebound_host_name_is_refused(host: str) -> None:
    async def scenario(client: TestClient[Any, Any], _page: PoseWeb) -> None:
        answer = await client.get("/api/status", headers={"Host": host})
        assert answer.status in {400, 421}

    browse(scenario)


@pytest.mark.parametrize("host", ["localhost:9", "127.0.0.1", "[::1]:8080"])
def test_a_forwarded_port_is_welcome(host: str) -> None:
    async def scenario(client: TestClient[Any, Any], _page: PoseWeb) -> None:
        answer = await client.get("/api/status", headers={"Host": host})
        assert await answer.json() == DOCUMENT

    browse(scenario)


def test_a_token_is_asked_for_and_moves_into_a_cookie() -> None:
    async def scenario(client: TestClient[Any, Any], _page: PoseWeb) -> None:
        assert (await client.get("/api/status")).status == 401
        assert (await client.get("/stream")).status == 401
        assert (await client.get("/?token=wrong", allow_redirects=False)).status == 401
        bearer = {"Authorization": f"Bearer {TOKEN}", "Host": "board.example"}
        assert (await client.get("/api/status", headers=bearer)).status == 200
        answer = await client.get(f"/?token={TOKEN}", allow_redirects=False)
        assert (answer.status, answer.headers["Location"]) == (303, "/")
        cookie = answer.cookies["pose_token"]
        assert cookie["httponly"]
        assert cookie["samesite"] == "Strict"
        assert (await client.get("/api/status", cookies={"pose_token": TOKEN})).status == 200

    browse(scenario, TOKEN)


def test_a_short_token_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("abc\n")
    with pytest.raises(ConfigError) as caught:
        read_token(file)
    assert caught.value.message == f"cannot use the page's token {file}: fewer than 16 ASCII characters"


def test_poses_come_as_events_in_pixels_of_the_frame() -> None:
    async def scenario(client: TestClient[Any, Any], page: PoseWeb) -> None:
        async with client.get("/api/poses") as answer:
            assert answer.content_type == "text/event-stream"
            assert await answer.content.readline() == b"retry: 1000\n"
            await answer.content.readline()
            page.publish(sample(7, Backend.CPU))
            line = await answer.content.readline()
        event = json.loads(line.removeprefix(b"data: "))
        assert (event["seq"], event["backend"], event["reason"]) == (7, "cpu", "ok")
        assert (event["frame"], event["latency_ms"]) == ([64, 48], 5.25)
        assert len(event["points"]) == 17
        assert event["points"][0] == [5.0, 5.0, 0.9]

    browse(scenario)


def test_the_stream_is_a_jpeg_after_a_jpeg() -> None:
    async def scenario(client: TestClient[Any, Any], page: PoseWeb) -> None:
        async with client.get("/stream") as answer:
            assert answer.headers["Content-Type"] == "multipart/x-mixed-replace; boundary=frame"
            assert await answer.content.readline() == b"--frame\r\n"
            for number in range(3):
                page.publish(sample(number))
                assert await answer.content.readline() == b"Content-Type: image/jpeg\r\n"
                size = int((await answer.content.readline()).removeprefix(b"Content-Length: "))
                await answer.content.readline()
                picture = await answer.content.readexactly(size)
                assert picture[:2] == b"\xff\xd8"
                assert picture[-2:] == b"\xff\xd9"
                assert await answer.content.readexactly(11) == b"\r\n--frame\r\n"

    browse(scenario)


def test_nothing_is_encoded_while_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[Sample] = []
    monkeypatch.setattr("inference.web.server.annotate", lambda picture, _quality: encoded.append(picture) or b"x")

    async def scenario(client: TestClient[Any, Any], page: PoseWeb) -> None:
        for number in range(5):
            page.publish(sample(number))
            await client.get("/healthz")
        assert encoded == []

    browse(scenario)


def test_a_sleeping_reader_loses_the_oldest_and_the_publisher_never_waits() -> None:
    async def scenario() -> None:
        fanout: Fanout[int] = Fanout(depth=2, places=2)
        with fanout.reader() as quick, fanout.reader() as asleep:
            with pytest.raises(TooManyReadersError), fanout.reader():
                pass
            for number in range(5):
                fanout.publish(number)
                assert await quick.next() == number
            assert (await asleep.next(), await asleep.next(), asleep.skipped) == (3, 4, 3)
            fanout.close()
            assert await asleep.next() is None
        assert len(fanout) == 0

    asyncio.run(scenario())


def test_health_follows_the_state_and_metrics_escape_what_models_are_called() -> None:
    async def scenario(client: TestClient[Any, Any], _page: PoseWeb) -> None:
        assert (await client.get("/healthz")).status == 200
        text = await (await client.get("/metrics")).text()
        assert 'pose_info{model="a\\"b",version="1",accelerator="virtual"} 1\n' in text
        assert "pose_fallbacks_total 1\n" in text
        assert 'pose_latency_seconds{quantile="0.95"} 0.006000\n' in text

    browse(scenario)

    async def without_camera(client: TestClient[Any, Any], _page: PoseWeb) -> None:
        assert (await client.get("/healthz")).status == 503

    browse(without_camera, document={**DOCUMENT, "state": "no-camera"})


def test_a_taken_port_is_an_error_with_a_remedy() -> None:
    async def scenario() -> None:
        page = PoseWeb(lambda: DOCUMENT, 80, None)
        taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = taken.sockets[0].getsockname()[1]
        with pytest.raises(InferenceError) as caught:
            await page.serve("127.0.0.1", port)
        assert caught.value.message.startswith(f"cannot listen on 127.0.0.1:{port}: ")
        taken.close()
        await taken.wait_closed()

    asyncio.run(scenario())

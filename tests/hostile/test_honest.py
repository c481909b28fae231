"""The honest path first: a refusal means nothing where nothing is ever accepted."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import uuid
from datetime import UTC, datetime
from pathlib import Path

import pytest

import agent
from agent.contract.errors import ErrorCode, OperationError
from agent.contract.linked import linked_runtime
from agent.host.key_changes import add
from agent.ports.runtimes import FileRuntimes
from agent.verbs.update import look
from tests.hostile.board import Stage, image, later, manifest
from tests.hostile.server import Handler, Server

SIZE = 700_000


def fetch_all(stage: Stage, url: str, held: list = []) -> object:  # noqa: B006
    source = stage.source(url)
    try:
        offered = source.manifest()
        return source.fetch(offered.extensions[0], held, lambda done, total: None)
    finally:
        source.close()


def test_a_full_transfer_arrives_over_one_connection(stage: Stage, server: Server) -> None:
    offered = stage.publish(image(1, SIZE))
    fetched = fetch_all(stage, server.url)
    wanted = offered.extensions[0]
    assert (fetched.way, fetched.base_image_id) == ("full", None)
    assert stage.store.image(wanted.image_id).read_bytes() == image(1, SIZE)
    assert not list((stage.state / "images").glob("*.p*")), "a part or its progress was left"


def test_the_delta_whose_base_is_held_is_chosen_and_is_smaller(stage: Stage, server: Server) -> None:
    stage.publish(image(1, SIZE), bases=[image(0, SIZE)])
    held = stage.hold(image(0, SIZE))
    source = stage.source(server.url)
    wanted = source.manifest().extensions[0]
    size, base = source.transfer_sizes(wanted, [held])
    assert base == held.image_id
    assert source.transfer_sizes(wanted, [])[1] is None
    fetched = source.fetch(wanted, [held], lambda done, total: None)
    source.close()
    assert (fetched.way, fetched.base_image_id, fetched.moved_bytes, fetched.note) == ("delta", base, size, "")
    assert size < 0.4 * len(image(1, SIZE))
    assert source.moved_bytes() > size
    assert stage.store.image(wanted.image_id).read_bytes() == image(1, SIZE)


def test_an_image_that_is_held_moves_nothing(stage: Stage, server: Server) -> None:
    stage.publish(image(1, SIZE))
    stage.hold(image(1, SIZE))
    fetched = fetch_all(stage, server.url)
    assert (fetched.way, fetched.moved_bytes) == ("held", 0)


def test_a_unix_socket_serves_as_well(stage: Stage, server: Server, tmp_path: Path) -> None:
    stage.publish(image(1, SIZE))
    path = tmp_path / "receive.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        bridge = threading.Thread(target=_pump_one, args=(listener, server.url))
        bridge.start()
        assert fetch_all(stage, f"unix:{path}").way == "full"
        bridge.join(5)
        assert not bridge.is_alive()


def _pump_one(listener: socket.socket, url: str) -> None:
    """One accepted connection, as `avocadoctl receive` carries it."""
    near, _ = listener.accept()
    host, port = url.removeprefix("http://").split(":")
    with near, socket.create_connection((host, int(port))) as far:
        back = threading.Thread(target=_copy, args=(far, near))
        back.start()
        _copy(near, far)
        far.shutdown(socket.SHUT_WR)
        back.join(5)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    while data := source.recv(65536):
        sink.sendall(data)


def test_a_cut_connection_goes_on_where_it_was(stage: Stage, server: Server) -> None:
    stage.publish(image(1, SIZE))
    cuts = []

    def cut_twice(handler: Handler, body: bytes) -> None:
        if len(cuts) == 2:
            handler.honest(body)
            return
        cuts.append(handler.headers.get("Range"))
        start = int((cuts[-1] or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        rest = body[start:]
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        handler.send_header("Content-Length", str(len(rest)))
        handler.end_headers()
        handler.wfile.write(rest[:300_000])
        handler.hang_up()

    server.rules[".full"] = cut_twice
    fetched = fetch_all(stage, server.url)
    assert cuts == [None, "bytes=262144-"]
    assert server.asked[-1][1] == "bytes=524288-"
    assert fetched.way == "full"
    assert fetched.moved_bytes < 1.3 * len(image(1, SIZE))


def test_another_process_resumes_from_the_part_on_disk(stage: Stage, server: Server) -> None:
    big = image(0, 3_500_000)
    stage.publish(big)
    wanted = stage.source(server.url).manifest().extensions[0]

    def cut(handler: Handler, body: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[:2_900_000] if handler.headers.get("Range") is None else b"")
        handler.hang_up()

    server.rules[".full"] = cut
    with pytest.raises(OperationError) as stopped:
        fetch_all(stage, server.url)
    assert stopped.value.code is ErrorCode.FETCH_FAILED
    assert stage.store.part(wanted.image_id).exists()
    server.rules.clear()
    server.asked.clear()
    fetched = fetch_all(stage, server.url)
    assert server.asked[-1][1] == "bytes=2097152-"
    assert fetched.moved_bytes < 1_500_000
    assert stage.store.image(wanted.image_id).read_bytes() == big


def test_a_part_that_lost_its_tail_in_a_power_cut_starts_over(stage: Stage, server: Server) -> None:
    big = image(0, 3_500_000)
    stage.publish(big)
    wanted = stage.source(server.url).manifest().extensions[0]
    server.rules[".full"] = lambda handler, body: (
        handler.reply(body[:2_900_000], Content_Length=str(len(body))),
        handler.hang_up(),
    )
    with pytest.raises(OperationError):
        fetch_all(stage, server.url)
    part = stage.store.part(wanted.image_id)
    with part.open("r+b") as file:
        file.seek(1000)
        file.write(bytes(5000))
    server.rules.clear()
    assert fetch_all(stage, server.url).way == "full"
    assert stage.store.image(wanted.image_id).read_bytes() == big


DEVICE = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cryptography", "numpy", "yaml"):
            raise ModuleNotFoundError(name)
sys.path[:0] = {paths!r}
sys.meta_path.insert(0, Absent())
from pathlib import Path
from agent.ports.fetch import HttpFetcher
from agent.ports.files import FileStore, write_durably
from agent.trust import Trust, open_source
state = Path({state!r})
trust = Trust(state / "metadata", "virtual", "x86_64", lambda: None, lambda: {now!r}, write_durably)
source = open_source(HttpFetcher({url!r}), trust, FileStore(state))
print(source.fetch(source.manifest().extensions[0], [], lambda done, total: None).way)
source.close()
"""


def test_a_board_without_the_host_s_packages_verifies_and_fetches(stage: Stage, server: Server) -> None:
    stage.publish(image(1, SIZE))
    paths = [str(Path(agent.__file__).parents[1]), *(path for path in sys.path if path.endswith("site-packages"))]
    code = DEVICE.format(paths=paths, state=str(stage.state), now=stage.clock, url=server.url)
    finished = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=50)
    assert (finished.stdout, finished.stderr) == ("full\n", "")


def test_the_same_timestamp_again_asks_for_nothing_more(stage: Stage, server: Server) -> None:
    offered = stage.publish(image(0))
    stage.source(server.url).manifest()
    server.asked.clear()
    assert stage.source(server.url).manifest() == offered
    asked = [path for path, _ in server.asked]
    assert asked[:2] == ["/metadata/2.root.json", "/metadata/timestamp.json"]
    assert not any(name in path for path in asked for name in ("snapshot", "targets.json", "releases.json"))


def test_the_delegation_is_asked_for_only_when_its_owner_changed_it(stage: Stage, server: Server) -> None:
    stage.publish(image(0))
    stage.source(server.url).manifest()
    server.asked.clear()
    offered = stage.publish(image(1), at=later(1), built_at="2026-11-02T10:00:00Z")
    assert stage.source(server.url).manifest() == offered
    assert [path for path, _ in server.asked if "targets.json" in path] == []
    add(stage.keys, "releases", "ci", now=later(1))
    offered = stage.publish(image(1), at=later(2), built_at="2026-11-02T10:00:00Z")
    assert stage.source(server.url).manifest() == offered
    assert len([path for path, _ in server.asked if "targets.json" in path]) == 1


def test_a_newer_publication_replaces_an_older_one(stage: Stage, server: Server) -> None:
    stage.publish(image(0, SIZE))
    assert stage.source(server.url).manifest().built_at == "2026-11-01T10:00:00Z"
    stage.publish(image(1, SIZE), at=later(1), built_at="2026-11-02T10:00:00Z")
    stage.clock = "2026-11-03T00:00:00Z"
    assert stage.source(server.url).manifest().built_at == "2026-11-02T10:00:00Z"


def test_a_signed_permission_allows_a_downgrade(stage: Stage, server: Server) -> None:
    stage.active = manifest(image(1), built_at="2026-11-01T10:00:01Z")
    stage.publish(image(0), allow_downgrade=True)
    assert stage.source(server.url).manifest().built_at < stage.active.built_at


def test_a_damaged_manifest_opens_no_way_back_and_its_own_runtime_is_let_in(stage: Stage, server: Server) -> None:
    older = stage.publish(image(0))
    newer = stage.publish(image(1), at=later(1), built_at="2026-11-02T10:00:00Z")
    stage.clock = "2026-11-03T00:00:00Z"
    stage.source(server.url).manifest()
    stage.active = linked_runtime(newer.id, {})
    stage.publish(image(0), at=later(2))
    with pytest.raises(OperationError) as refused:
        stage.source(server.url).manifest()
    assert (refused.value.code, refused.value.message) == (
        ErrorCode.DOWNGRADE_REFUSED,
        "cannot deploy runtime pose 2: it was built at 2026-11-01T10:00:00Z, the newest one seen at"
        " 2026-11-02T10:00:00Z",
    )
    # Somebody had rolled back to it.
    stage.active = linked_runtime(older.id, {})
    assert stage.source(server.url).manifest() == older


def test_a_board_whose_active_manifest_is_damaged_is_offered_its_own_runtime(stage: Stage, server: Server) -> None:
    offered = stage.publish(image(0), at=datetime.now(UTC))
    (stage.state / "board.json").write_text('{"target": "virtual", "arch": "x86_64"}')
    runtimes = FileRuntimes(stage.state)
    folder = runtimes.stage(offered)
    runtimes.activate(offered.id, None)
    assert look(server.url, stage.state) == (offered.id, offered.id, False)
    for spoil in (lambda path: path.write_text("garbage"), Path.unlink):
        spoil(folder / "manifest.json")
        assert look(server.url, stage.state) == (offered.id, offered.id, True)


def test_what_lies_on_the_board_is_a_floor_where_the_active_manifest_is_damaged(stage: Stage, server: Server) -> None:
    known = [manifest(image(1), built_at=f"2026-11-0{day}T10:00:00Z") for day in (3, 2)]
    stage.active = linked_runtime("5f0c9f7a-7a0a-4c4e-9a53-0d4a1c9b1a11", {}, iter(known))
    stage.publish(image(0))
    with pytest.raises(OperationError) as refused:
        stage.source(server.url).manifest()
    assert (refused.value.code, refused.value.message) == (
        ErrorCode.DOWNGRADE_REFUSED,
        "cannot deploy runtime pose 2: it was built at 2026-11-01T10:00:00Z, the newest one seen at"
        " 2026-11-03T10:00:00Z",
    )


@pytest.mark.parametrize(
    ("known", "is_taken"),
    [
        ([], False),
        (["2026-10-01T10:00:00Z"], True),
        (["2026-10-01T10:00:00Z", "2026-11-01T10:00:00Z"], False),  # as old as what is offered
    ],
)
def test_by_itself_a_board_that_knows_nothing_of_its_runtime_takes_only_what_is_newer_than_all_it_has(
    stage: Stage, server: Server, known: list[str], *, is_taken: bool
) -> None:
    lost, offered = manifest(image(1)), stage.publish(image(0), at=datetime.now(UTC))
    (stage.state / "board.json").write_text('{"target": "virtual", "arch": "x86_64"}')
    runtimes = FileRuntimes(stage.state)
    for built_at in known:
        runtimes.stage(manifest(image(1), built_at=built_at).model_copy(update={"id": str(uuid.uuid4())}))
    folder = runtimes.stage(lost)
    runtimes.activate(lost.id, None)
    (folder / "manifest.json").write_text("garbage")
    if is_taken:
        assert look(server.url, stage.state) == (offered.id, lost.id, True)
        return
    with pytest.raises(OperationError) as refused:
        look(server.url, stage.state)
    assert (refused.value.code, refused.value.message, refused.value.remedy) == (
        ErrorCode.DOWNGRADE_REFUSED,
        "cannot update to runtime pose 2: the manifest of the active one is damaged, and nothing on this board tells"
        " that this one is newer",
        "Deploy from the host: avocadoctl deploy -H BOARD",
    )
    # A person's deploy is judged by the trust policy alone.
    stage.active = linked_runtime(lost.id, {})
    stage.clock = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert stage.source(server.url).manifest() == offered

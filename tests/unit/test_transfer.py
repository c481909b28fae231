"""A transfer that goes on where it was: what is remembered of it is a hint, and the bytes are right all the same."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.contract.delta import Transfer
from agent.contract.errors import ErrorCode, HostGoneError, OperationError
from agent.delta.describe import read_info
from agent.delta.encode import Effort, encode_delta
from agent.host.transfers import describe_transfer
from agent.transfer import Base, run_transfer

SIZE = 2_500_000


@dataclass
class Server:
    """One file, cut off after so many bytes of an answer."""

    data: bytes
    cut_after: int | None = None
    asked: list[int] = field(default_factory=list)
    paused: list[float] = field(default_factory=list)

    def pause(self, seconds: float) -> None:
        self.paused.append(seconds)

    def get(self, path: str, limit: int, *, exact: bool = False, offset: int = 0) -> Iterator[bytes]:
        self.asked.append(offset)
        end = len(self.data) if self.cut_after is None else offset + self.cut_after
        for at in range(offset, min(end, len(self.data)), 65536):
            yield self.data[at : min(at + 65536, end)]
        if end < len(self.data):
            raise OperationError(ErrorCode.CHANGE_CANCELLED, "cannot go on: the host left")

    def received_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Begun:
    """A base, the delta from it, and what an interrupted run of it left."""

    base: Base
    transfer: Transfer
    file: Path
    result: bytes
    left: dict[str, bytes]

    def resume(self, folder: Path, **changed: bytes) -> Server:
        """Finish it with some of what was left changed; the server that was asked."""
        for path in folder.iterdir():
            path.unlink()
        for suffix, data in {**self.left, **changed}.items():
            (folder / f"image.{suffix.replace('_', '-')}").write_bytes(data)
        server = Server(self.file.read_bytes())
        run_transfer(server, self.transfer, self.base, folder / "image.part", lambda done, total: None)
        assert (folder / "image.part").read_bytes() == self.result
        assert [path.name for path in folder.iterdir()] == ["image.part"], "what was remembered is still there"
        return server


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    folder = tmp_path_factory.mktemp("begun")
    old, result = random.Random(1).randbytes(SIZE), random.Random(2).randbytes(SIZE)
    (folder / "old").write_bytes(old)
    (folder / "new").write_bytes(old[:100_000] + result)
    encode_delta(folder / "old", folder / "new", folder / "delta", effort=Effort.QUICK)
    transfer = describe_transfer(folder / "delta", "x.delta")
    base, delta = Base(folder / "old", str(transfer.base_sha256)), folder / "delta"
    with pytest.raises(OperationError, match="the host left"):
        run_transfer(
            Server(delta.read_bytes(), 2_400_000), transfer, base, folder / "image.part", lambda done, total: None
        )
    left = {suffix: (folder / f"image.{suffix}").read_bytes() for suffix in ("part", "progress")}
    return Begun(base, transfer, delta, (folder / "new").read_bytes(), left)


def remembered(begun: Begun, **checkpoint: Any) -> bytes:
    document = json.loads(begun.left["progress"])
    document["checkpoint"] |= checkpoint
    return json.dumps(document).encode()


def test_it_goes_on_at_the_chunk_where_it_was(begun: Begun, tmp_path: Path) -> None:
    offset = json.loads(begun.left["progress"])["checkpoint"]["delta_offset"]
    step = begun.transfer.chunk_bytes
    assert offset > 2_000_000
    assert begun.resume(tmp_path).asked == [offset // step * step]


def test_what_a_kill_left_of_the_next_progress_goes_with_the_rest(begun: Begun, tmp_path: Path) -> None:
    begun.resume(tmp_path, progress_new=b"{")


def test_a_disk_that_is_full_leaves_nothing(begun: Begun, tmp_path: Path) -> None:
    for suffix in ("part", "progress", "progress-new"):
        (tmp_path / f"image.{suffix}").write_bytes(b"{")

    def full(done: int, total: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OperationError) as caught:
        run_transfer(Server(begun.file.read_bytes()), begun.transfer, begun.base, tmp_path / "image.part", full)
    assert caught.value.code is ErrorCode.NO_SPACE
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"[]",
        b"{",
        b'{"schema": 1}',
        b"[" * 9000,
        b"\xff" * 100,
        b"null",
        b'{"schema": 1, "transfer": "0", "checkpoint": {}}',
    ],
)
def test_a_progress_file_that_is_none_starts_over(begun: Begun, tmp_path: Path, damage: bytes) -> None:
    assert begun.resume(tmp_path, progress=damage).asked == [0]


def test_a_part_that_is_not_what_was_remembered_starts_over(begun: Begun, tmp_path: Path) -> None:
    part = begun.left["part"]
    for damaged in (b"", part[:1000], b"!" + part[1:]):
        assert begun.resume(tmp_path, part=damaged).asked[-1] == 0


numbers = st.integers() | st.integers(0, SIZE) | st.just(1 << 80)
values = numbers | st.none() | st.booleans() | st.text(max_size=70) | st.floats() | st.lists(numbers, max_size=2)
names = ["delta_offset", "produced", "cursor", "crc", "part_sha256", "info", "other"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changed=st.dictionaries(st.sampled_from(names), values, min_size=1, max_size=3))
def test_whatever_is_remembered_the_bytes_are_right(begun: Begun, tmp_path: Path, changed: dict[str, Any]) -> None:
    begun.resume(tmp_path, progress=remembered(begun, **changed))


def test_a_header_that_was_remembered_is_not_believed(begun: Begun, tmp_path: Path) -> None:
    for name in ("segment_bytes", "base_size_bytes"):
        progress = remembered(begun, info={**asdict(read_info(begun.file)), name: "x"})
        assert begun.resume(tmp_path, progress=progress).asked == [0]


@dataclass
class Failing(Server):
    """Breaks each answer off with the next of these, and at last answers."""

    errors: list[OperationError] = field(default_factory=list)

    def get(self, path: str, limit: int, *, exact: bool = False, offset: int = 0) -> Iterator[bytes]:
        for piece in super().get(path, limit, exact=exact, offset=offset):
            if self.errors:
                raise self.errors.pop(0)
            yield piece


def broken(why: str, kind: type[OperationError] = OperationError) -> OperationError:
    return kind(ErrorCode.FETCH_FAILED, f"cannot fetch it: {why}")


def transferred(begun: Begun, folder: Path, server: Server) -> None:
    run_transfer(server, begun.transfer, begun.base, folder / "image.part", lambda done, total: None)


def test_a_server_that_comes_back_is_asked_again_after_growing_pauses(begun: Begun, tmp_path: Path) -> None:
    server = Failing(begun.file.read_bytes(), errors=[broken("reset"), broken("refused"), broken("refused")])
    transferred(begun, tmp_path, server)
    assert server.paused == [1.0, 5.0, 20.0]
    assert (tmp_path / "image.part").read_bytes() == begun.result


def test_what_first_broke_a_transfer_is_what_is_said(begun: Begun, tmp_path: Path) -> None:
    server = Failing(begun.file.read_bytes(), errors=[broken("it stalls"), *[broken("Connection refused")] * 3])
    with pytest.raises(OperationError, match=r"^cannot fetch it: it stalls$"):
        transferred(begun, tmp_path, server)
    assert len(server.asked) == 4


def test_a_host_that_left_is_not_asked_again(begun: Begun, tmp_path: Path) -> None:
    server = Failing(begun.file.read_bytes(), errors=[broken("it stalls"), broken("the host left", HostGoneError)])
    with pytest.raises(OperationError, match=r"^cannot fetch it: it stalls$"):
        transferred(begun, tmp_path, server)
    assert (server.asked, server.paused) == ([0, 0], [1.0])

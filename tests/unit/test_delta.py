"""The delta codec: what was encoded comes back, what was damaged is refused by name and leaves nothing behind."""

from __future__ import annotations

import os
import random
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.contract.errors import ErrorCode, OperationError
from agent.delta import zstd
from agent.delta.apply import FAULTS, Checkpoint, add_bytes, apply_delta
from agent.delta.encode import Effort, encode_delta
from agent.delta.format import HEADER_BYTES, DeltaInfo, Op, OpKind, pack_header, pack_op, pack_trailer, parse_header
from agent.delta.match import Buffer, Run, find_runs
from agent.delta.stream import file_chunks, file_sha256
from agent.delta.ways import subtract_bytes


def round_trip(folder: Path, old: bytes | None, new: bytes) -> bytes:
    base = folder / "base" if old is not None else None
    if base is not None:
        base.write_bytes(old or b"")
    (folder / "new").write_bytes(new)
    encode_delta(base, folder / "new", folder / "delta")
    apply_delta(base, file_chunks(folder / "delta"), folder / "out")
    assert (folder / "out").read_bytes() == new
    return (folder / "delta").read_bytes()


def noise(seed: int, count: int) -> bytes:
    return random.Random(seed).randbytes(count)


small = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
edits = st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 5000), st.binary(max_size=300)), max_size=6)


@small
@given(seed=st.integers(0, 1000), size=st.integers(0, 40_000), edits=edits)
def test_any_edited_file_comes_back(tmp_path: Path, seed: int, size: int, edits: list[tuple[int, int, bytes]]) -> None:
    old = noise(seed, size)
    new = bytearray(old)
    for at, drop, insert in edits:
        new[at : at + drop] = insert
    round_trip(tmp_path, old, bytes(new))


@small
@given(old=st.none() | st.binary(max_size=9000), new=st.binary(max_size=9000))
def test_any_pair_of_byte_strings_comes_back(tmp_path: Path, old: bytes | None, new: bytes) -> None:
    round_trip(tmp_path, old, new)


@given(pair=st.integers(0, 3000).flatmap(lambda n: st.tuples(*[st.binary(min_size=n, max_size=n)] * 2)))
def test_adding_undoes_subtracting(pair: tuple[bytes, bytes]) -> None:
    left, right = pair
    assert add_bytes(subtract_bytes(left, right), right) == left
    assert subtract_bytes(left, right) == bytes((a - b) % 256 for a, b in zip(left, right, strict=True))


def test_weights_that_all_moved_a_little_become_a_fraction(tmp_path: Path) -> None:
    old = noise(1, 400_000)
    shift = random.Random(2)
    new = bytes((byte + shift.choice((-1, 0, 1))) % 256 for byte in old)
    assert len(round_trip(tmp_path, old, new)) < 0.25 * len(new)


def test_a_file_that_moved_by_less_than_a_block_is_copied(tmp_path: Path) -> None:
    old = noise(3, 300_000)
    assert len(round_trip(tmp_path, old, b"prefix" + old[:150_000] + b"xy" + old[150_000:])) < 1000


def test_an_unchanged_file_is_one_copy(tmp_path: Path) -> None:
    old = noise(4, 3_000_001)
    assert len(round_trip(tmp_path, old, old)) < HEADER_BYTES + 16


def retrained(folder: Path) -> tuple[Path, Path]:
    """A base of noise, and the same with some of it moved, some new, and some text in it."""
    old = noise(20, 1_300_000)
    shift = random.Random(21)
    moved = bytes((byte + shift.choice((-1, 0, 1))) % 256 for byte in old[:700_000])
    (folder / "old").write_bytes(old)
    (folder / "new").write_bytes(moved + noise(22, 500_000) + b"some text in it\n" * 9000 + old[1_000_000:])
    return folder / "old", folder / "new"


def test_the_delta_is_the_same_on_one_processor_and_on_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = retrained(tmp_path)
    found = []
    for processors in (1, 3):
        monkeypatch.setattr("os.cpu_count", lambda count=processors: count)
        encode_delta(old, new, tmp_path / "delta")
        found.append((tmp_path / "delta").read_bytes())
    assert found[0] == found[1]


def test_a_delta_made_in_a_hurry_is_larger_and_makes_the_same_file(tmp_path: Path) -> None:
    old, new = retrained(tmp_path)
    sizes = {}
    for effort in Effort:
        encode_delta(old, new, tmp_path / "delta", effort=effort)
        apply_delta(old, file_chunks(tmp_path / "delta"), tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == new.read_bytes()
        sizes[effort] = (tmp_path / "delta").stat().st_size
    assert 0.5 * sizes[Effort.QUICK] < sizes[Effort.BEST] < sizes[Effort.QUICK]


@pytest.mark.parametrize("old_bytes", [4096, 100_000])
def test_a_delta_of_what_compresses_better_than_copies_is_no_larger_than_the_full_transfer(
    tmp_path: Path, old_bytes: int
) -> None:
    new = bytes(8 << 20)
    full = len(round_trip(tmp_path, None, new))
    assert len(round_trip(tmp_path, bytes(old_bytes), new)) <= full


def test_copies_are_weighed_where_the_rest_of_the_file_is_new(tmp_path: Path) -> None:
    part = noise(10, 500_000)
    assert len(round_trip(tmp_path, bytes(4096) + part, part + bytes(8 << 20) + noise(11, 1000))) < 2500


def test_a_delta_that_fragments_cost_more_than_the_base_saves_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = b"".join(b"line %d of many\n" % (n % 50) for n in range(60_000))
    full = len(round_trip(tmp_path, None, text))
    cut_up = [Run(at, 1000, None) for at in range(0, len(text) // 1000 * 1000, 1000)]
    cut_up.append(Run(len(text) // 1000 * 1000, len(text) % 1000, None))
    copies = [Run(run.start, run.length, run.start) if n % 2 else run for n, run in enumerate(cut_up)]
    monkeypatch.setattr("agent.delta.encode.find_runs", lambda old, new: copies)
    monkeypatch.setattr("agent.delta.segments._BRIDGED_COPY_BYTES", 0)
    assert len(round_trip(tmp_path, text, text)) <= full


class Touch:
    """Changes a file once the encoder has come so far."""

    def __init__(self, change: Callable[[], object]) -> None:
        self._change = change
        self.done = False

    def __call__(self, done: int, total: int) -> None:
        if not self.done and 0 < done < total:
            self.done = True
            self._change()


def written_over(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1_000_000)
        file.write(bytes(1_500_000))


@pytest.mark.parametrize(("name", "code"), [("new", ErrorCode.DELTA_WRONG_RESULT), ("old", ErrorCode.DELTA_WRONG_BASE)])
@pytest.mark.parametrize("change", [written_over, lambda path: os.truncate(path, 10)])
def test_a_file_that_changes_while_it_is_encoded_makes_no_delta(
    tmp_path: Path, name: str, code: ErrorCode, change: Callable[[Path], object]
) -> None:
    old, new = retrained(tmp_path)
    for path in (old, new):
        path.write_bytes(path.read_bytes() * 3)
    touch = Touch(lambda: change(tmp_path / name))
    with pytest.raises(OperationError) as refused:
        encode_delta(old, new, tmp_path / "delta", progress=touch)
    assert touch.done
    assert (refused.value.code, refused.value.message) == (
        code,
        f"cannot make the delta: {tmp_path / name} changed meanwhile",
    )
    assert refused.value.remedy == "Make it again when nobody writes to that file."
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]


def test_a_change_that_leaves_no_trace_in_the_file_s_times_makes_no_delta(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, new = retrained(tmp_path)

    def change(old: Buffer, now: Buffer) -> list[Run]:
        times = new.stat()
        with new.open("r+b") as file:
            file.write(bytes(1000))
        os.utime(new, ns=(times.st_atime_ns, times.st_mtime_ns))
        return find_runs(old, now)

    monkeypatch.setattr("agent.delta.encode.find_runs", change)
    with pytest.raises(OperationError) as refused:
        encode_delta(None, new, tmp_path / "delta", effort=Effort.QUICK)
    assert refused.value.message == "cannot make the delta: it would make another file than it was made for"
    assert not (tmp_path / "delta").exists()


def test_a_base_that_does_not_read_is_a_wrong_base(tmp_path: Path, sample: tuple[Path, bytes, bytes]) -> None:
    _, _, delta = sample
    size = parse_header(delta[:HEADER_BYTES]).base_size_bytes
    gone = tmp_path / "base"
    gone.write_bytes(b"")
    with pytest.raises(OperationError) as refused, pytest.MonkeyPatch.context() as patch:
        patch.setattr("agent.delta.apply.os.pread", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        patch.setattr(Path, "stat", lambda *_, **__: SimpleNamespace(st_size=size))
        apply_delta(gone, [delta], tmp_path / "out", base_sha256=parse_header(delta[:HEADER_BYTES]).base_sha256)
    assert (refused.value.code, refused.value.message) == (
        ErrorCode.DELTA_WRONG_BASE,
        "cannot apply the delta: its base does not read: Input/output error",
    )


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, bytes]:
    """A base, a result and a delta in which every kind of operation occurs."""
    folder = tmp_path_factory.mktemp("sample")
    base = folder / "base"
    text = b"".join(b"line %d of a source file\n" % n for n in range(2000))
    weights = noise(5, 60_000)
    base.write_bytes(text + weights + noise(6, 40_000))
    moved = bytes((byte + (index % 3)) % 256 for index, byte in enumerate(weights))
    result = text.replace(b"line 7", b"LINE 7").replace(b"1999", b"n") + moved + noise(7, 5000) + noise(6, 40_000)
    (folder / "new").write_bytes(result)
    encode_delta(base, folder / "new", folder / "delta")
    return base, result, (folder / "delta").read_bytes()


def refuse(base: Path | None, delta: bytes, out: Path) -> OperationError:
    with pytest.raises(OperationError) as refused:
        apply_delta(base, [delta], out)
    assert not out.exists(), "a refused delta left a file behind"
    assert refused.value.code in FAULTS
    assert refused.value.message.startswith("cannot apply the delta: ")
    return refused.value


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_is_refused(tmp_path: Path, sample: tuple[Path, bytes, bytes], data: st.DataObject) -> None:
    base, _, delta = sample
    bit = data.draw(st.integers(0, len(delta) * 8 - 1))
    damaged = bytearray(delta)
    damaged[bit // 8] ^= 1 << bit % 8
    refuse(base, bytes(damaged), tmp_path / "out")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_truncation_is_refused(tmp_path: Path, sample: tuple[Path, bytes, bytes], data: st.DataObject) -> None:
    base, _, delta = sample
    refuse(base, delta[: data.draw(st.integers(0, len(delta) - 1))], tmp_path / "out")


def test_bytes_after_the_end_are_refused(tmp_path: Path, sample: tuple[Path, bytes, bytes]) -> None:
    base, _, delta = sample
    assert refuse(base, delta + b"\0", tmp_path / "out").message == "cannot apply the delta: bytes follow its end"


def test_a_base_changed_by_one_bit_is_named(tmp_path: Path, sample: tuple[Path, bytes, bytes]) -> None:
    base, _, delta = sample
    other = tmp_path / "other"
    other.write_bytes(base.read_bytes()[:-1] + b"?")
    error = refuse(other, delta, tmp_path / "out")
    assert error.code is ErrorCode.DELTA_WRONG_BASE
    assert error.remedy == "Take the full transfer instead."
    assert error.facts == {"wanted": file_sha256(base), "found": file_sha256(other)}
    assert refuse(None, delta, tmp_path / "out").code is ErrorCode.DELTA_WRONG_BASE


def crafted(*ops: tuple[Op, bytes], result_size: int, segment: int = 1 << 20) -> bytes:
    """A delta without a base whose checksum is right, so that only the operation itself can be at fault."""
    body = pack_header(DeltaInfo(None, 0, "0" * 64, result_size, segment))
    for op, payload in ops:
        body += pack_op(op, 0) + payload
    body += pack_op(Op(OpKind.END, 0), 0)
    return body + pack_trailer(zlib.crc32(body))


BOMB = zstd.compress(bytes(1 << 26), 3)


@pytest.mark.parametrize(
    ("delta", "why"),
    [
        (b"", "it is cut short"),
        (b"NOTADELT" + bytes(HEADER_BYTES), "it does not begin as a delta does"),
        (
            crafted((Op(OpKind.DATA, 1000, payload_bytes=len(BOMB)), BOMB), result_size=1000),
            f"a payload of {len(BOMB)} bytes for 1000",
        ),
        (
            crafted((Op(OpKind.DATA, 1 << 20, payload_bytes=len(BOMB)), BOMB), result_size=1 << 20),
            "a segment does not decompress: a frame of 1048576 bytes names 67108864",
        ),
        (crafted((Op(OpKind.COPY, 10, 0), b""), result_size=10), "it reads bytes 0 to 10 of a base of 0"),
        (crafted(result_size=10), "it ends after 0 of 10 bytes"),
        (
            crafted((Op(OpKind.DATA, 11, payload_bytes=0), b""), result_size=10),
            "an operation makes 11 bytes where 10 are left",
        ),
        (
            crafted((Op(OpKind.DATA, 4097, payload_bytes=0), b""), result_size=9000, segment=4096),
            "a segment of 4097 bytes, bound 4096",
        ),
        (crafted(result_size=0, segment=1 << 30), "it asks for segments of 1073741824 and windows of 4194304 bytes"),
        (crafted(result_size=0), "the result's hash is not the one the header promises"),
    ],
)
def test_a_crafted_delta_is_refused_with_its_reason(tmp_path: Path, delta: bytes, why: str) -> None:
    tracemalloc.start()
    error = refuse(None, delta, tmp_path / "out")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert error.message == f"cannot apply the delta: {why}"
    assert peak < 8 << 20


def test_a_newer_format_asks_for_a_newer_agent(tmp_path: Path) -> None:
    error = refuse(None, pack_header(DeltaInfo(None, 0, "0" * 64, 0, format=2)), tmp_path / "out")
    assert error.code is ErrorCode.NEWER_SCHEMA
    assert error.remedy == "Update the avocado-agent extension first."


def test_the_header_reads_back() -> None:
    info = DeltaInfo("ab" * 32, 5, "cd" * 32, 7, 1 << 16, 1 << 18)
    assert parse_header(pack_header(info)) == info


class Cut(Exception):
    """The connection dropped."""


def cut_after(delta: bytes, start: int, count: int) -> Iterator[bytes]:
    yield delta[start : start + count]
    raise Cut


def test_an_apply_cut_anywhere_resumes_at_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "new").write_bytes(noise(8, 5_000_000))
    encode_delta(None, tmp_path / "new", tmp_path / "delta")
    delta = (tmp_path / "delta").read_bytes()
    marks: list[Checkpoint] = []
    start = 0
    for _ in range(4):
        with pytest.raises(Cut):
            apply_delta(
                None,
                cut_after(delta, start, 1_500_000),
                tmp_path / "out",
                resume=marks[-1] if marks else None,
                on_checkpoint=marks.append,
            )
        assert marks[-1].delta_offset > start, "no progress was kept"
        start = marks[-1].delta_offset
    apply_delta(None, [delta[start:]], tmp_path / "out", resume=marks[-1])
    assert (tmp_path / "out").read_bytes() == (tmp_path / "new").read_bytes()


def test_a_part_that_is_not_what_its_checkpoint_says_is_refused(tmp_path: Path) -> None:
    (tmp_path / "new").write_bytes(noise(9, 2_500_000))
    encode_delta(None, tmp_path / "new", tmp_path / "delta")
    marks: list[Checkpoint] = []
    apply_delta(None, file_chunks(tmp_path / "delta"), tmp_path / "out", on_checkpoint=marks.append)
    with (tmp_path / "out").open("r+b") as out:
        out.write(b"!")
    with pytest.raises(OperationError) as refused:
        apply_delta(None, file_chunks(tmp_path / "delta", marks[0].delta_offset), tmp_path / "out", resume=marks[0])
    assert refused.value.message == "cannot apply the delta: the part file is not what its checkpoint says"


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    with (tmp_path / "new").open("wb") as new:
        for seed in range(24):
            new.write(noise(seed % 3, 1 << 20))
    old = tmp_path / "old"
    old.write_bytes((tmp_path / "new").read_bytes()[: 20 << 20])
    encode_delta(old, tmp_path / "new", tmp_path / "delta")
    sha256 = file_sha256(old)
    tracemalloc.start()
    apply_delta(old, file_chunks(tmp_path / "delta"), tmp_path / "out", base_sha256=sha256)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20

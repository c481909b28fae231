"""Applying takes the same few megabytes whatever the image: the whole command, measured by the kernel."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from agent.delta import zstd
from agent.delta.apply import file_sha256
from agent.delta.format import DeltaInfo, Op, OpKind, next_cursor, pack_header, pack_op, pack_trailer

ROOT = Path(__file__).parents[2]
SEGMENT = 1 << 20
WINDOW = 4 << 20
MOST_KIB = 24 << 10
PLUS_SEVEN = bytes((byte + 7) % 256 for byte in range(256))
PEAK = "; print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])"


def peak_kib(code: str, *arguments: str) -> int:
    """The most memory a fresh Python held while it ran this."""
    line = [sys.executable, "-I", "-c", code + PEAK, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=600)
    return int(done.stdout.split()[-1])


def write_pair(folder: Path, size: int) -> None:
    """A base, and a delta whose segments are as large as they may be, of every kind in turn."""
    noise = random.Random(1).randbytes(WINDOW + SEGMENT)
    with (folder / "old").open("wb") as old:
        for at in range(0, size, SEGMENT):
            old.write(noise[at % WINDOW : at % WINDOW + SEGMENT])
    sevens = zstd.compress(b"\7" * SEGMENT, 1)
    other = random.Random(2).randbytes(SEGMENT)
    data = zstd.compress(other, 1)
    digest, body, cursor = hashlib.sha256(), b"", 0
    base_sha256 = file_sha256(folder / "old")
    with (folder / "old").open("rb") as old, (folder / "body").open("wb") as out:
        for at in range(0, size, SEGMENT):
            old.seek(at)
            piece = old.read(SEGMENT)
            payload = b""
            match (at // SEGMENT + 1) % 4:  # the costliest kind is in the smallest file as well
                case 0:
                    op = Op(OpKind.COPY, len(piece), at)
                case 1:
                    op, payload, piece = Op(OpKind.DATA, SEGMENT, payload_bytes=len(data)), data, other
                case 2:
                    op, payload = Op(OpKind.ADD, len(piece), at, payload_bytes=len(sevens)), sevens
                    piece = piece.translate(PLUS_SEVEN)
                case _:
                    start = max(0, min(at, size - WINDOW))
                    old.seek(start)
                    window = old.read(min(WINDOW, size))
                    piece = piece[::-1]
                    payload = zstd.compress(piece, 1, window)
                    op = Op(OpKind.PREFIX, SEGMENT, start, len(window), len(payload))
            digest.update(piece)
            out.write(pack_op(op, cursor) + payload)
            cursor = next_cursor(op, cursor)
        out.write(pack_op(Op(OpKind.END, 0), cursor))
    head = pack_header(DeltaInfo(base_sha256, size, digest.hexdigest(), size))
    crc = zlib.crc32(head)
    with (folder / "body").open("rb") as source, (folder / "delta").open("wb") as delta:
        delta.write(head)
        while body := source.read(SEGMENT):
            crc = zlib.crc32(body, crc)
            delta.write(body)
        delta.write(pack_trailer(crc))
    (folder / "body").unlink()


def above_bare_kib(folder: Path, size: int) -> int:
    folder.mkdir()
    write_pair(folder, size)
    files = [str(folder / name) for name in ("old", "delta", "out")]
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from agent.cli import main; "
    code += "assert main(['delta', 'apply', *sys.argv[1:]]) == 0"
    try:
        return peak_kib(code, *files) - peak_kib("pass")
    finally:
        for name in files:
            Path(name).unlink(missing_ok=True)


def test_applying_a_small_image_takes_24_mib_at_most(tmp_path: Path) -> None:
    assert above_bare_kib(tmp_path / "small", 4 * SEGMENT) <= MOST_KIB


@pytest.mark.long
def test_applying_a_gibibyte_takes_no_more_than_applying_three_megabytes(tmp_path: Path) -> None:
    small, large = above_bare_kib(tmp_path / "small", 3 << 20), above_bare_kib(tmp_path / "large", 1 << 30)
    print(f"above a bare Python: {small / 1024:.1f} MiB for 3 MiB, {large / 1024:.1f} MiB for 1 GiB")
    assert max(small, large) <= MOST_KIB
    assert large - small <= WINDOW >> 10  # the window of the small one is only as long as its base

"""`python -m tests.fuzz.seeds`: writes the seeds of tests/fuzz/corpus/delta; what a fuzzer finds is added by hand."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from agent.delta.encode import encode_delta
from tests.fuzz.target import BASE

CORPUS = Path(__file__).with_name("corpus") / "delta"


def results() -> dict[str, bytes]:
    dice = random.Random(1)
    shifted = bytes((byte + dice.choice((-1, 0, 1))) % 256 for byte in BASE[:4096])
    return {
        "copy": BASE,
        "copy-moved": b"new" + BASE[5000:] + BASE[:5000],
        "data": dice.randbytes(600),
        "prefix": BASE[16384:].replace(b"brown", b"green"),
        "add": shifted + BASE[4096:],
        "empty": b"",
    }


def main() -> None:
    CORPUS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "base").write_bytes(BASE)
        for name, result in results().items():
            (folder / "new").write_bytes(result)
            encode_delta(folder / "base", folder / "new", folder / "delta")
            delta = (folder / "delta").read_bytes()
            (CORPUS / f"{name}.raw").write_bytes(b"\0" + delta)
            (CORPUS / f"{name}.sealed").write_bytes(b"\2" + delta)
        encode_delta(None, folder / "new", folder / "delta")
        (CORPUS / "full.raw").write_bytes(b"\0" + (folder / "delta").read_bytes())
    old = random.Random(2).randbytes(5000)
    pair = old[:2000] + b"between" + old[2500:]
    (CORPUS / "pair").write_bytes(b"\1" + len(old).to_bytes(2, "little") + old + pair)


if __name__ == "__main__":
    main()

"""`make fuzz-delta`: coverage-guided input for the delta codec, from the corpus in tests/fuzz/corpus/delta.

libFuzzer bounds memory and time; what must hold besides is in target.py.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["agent"]):
    from tests.fuzz.target import try_input


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="fuzz-delta-", dir="/dev/shm") as scratch:
        atheris.Setup(sys.argv, lambda data: try_input(Path(scratch), data))
        atheris.Fuzz()


if __name__ == "__main__":
    main()

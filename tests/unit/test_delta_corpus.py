"""Every input that a fuzzer once found worth keeping, again: tests/fuzz/corpus/delta."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.seeds import CORPUS
from tests.fuzz.target import try_input


@pytest.mark.parametrize("kept", sorted(CORPUS.iterdir()), ids=lambda path: path.name)
def test_a_kept_input_is_applied_or_refused_by_name(kept: Path, tmp_path: Path) -> None:
    try_input(tmp_path, kept.read_bytes())

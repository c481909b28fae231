"""The active runtime's manifest is damaged on the disk: that is said by name, and a new runtime is let in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.contract.errors import ErrorCode, OperationError
from agent.observe import Disk
from agent.ports.files import FileRuntimes
from tests.change.stories import R1


def test_a_damaged_manifest_is_named_and_stands_in_nobodys_way(tmp_path: Path) -> None:
    runtimes, unused = FileRuntimes(tmp_path), None
    store: Any = unused
    disk = Disk(store, runtimes, store)
    assert disk.active_manifest() is None
    folder = runtimes.stage(R1)
    runtimes.activate(R1.id, None)
    assert disk.active_manifest() == R1
    (folder / "manifest.json").write_text("garbage")
    assert disk.active_manifest() is None
    with pytest.raises(OperationError) as caught:
        runtimes.manifest(R1.id)
    assert (caught.value.code, caught.value.remedy) == (
        ErrorCode.BAD_MANIFEST,
        "Deploy again from the host: avocadoctl deploy -H BOARD",
    )
    assert caught.value.message.startswith(f"cannot read the manifest of runtime {R1.id}: ")

"""avocadoctl root-authority: whom a board trusts, whatever lies in its cache."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agent import cli
from agent.host.first_keys import init_keys
from agent.host.key_changes import rotate
from agent.host.keys import Keys

NOW = datetime(2026, 11, 1, tzinfo=UTC)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return init_keys(tmp_path / "keys", None, root_keys=2, root_threshold=2, now=NOW)


@pytest.fixture
def metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: Keys) -> Path:
    folder = tmp_path / "metadata"
    (folder / "cache" / "root_history").mkdir(parents=True)
    (folder / "root.json").write_bytes(keys.root_bytes())
    monkeypatch.setenv("AVOCADO_METADATA_DIR", str(folder))
    return folder


def test_the_newest_accepted_root_is_shown_with_names_and_thresholds(
    metadata: Path, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    rotate(keys, "online", now=NOW)
    (metadata / "cache" / "root_history" / "2.root.json").write_bytes(keys.root_bytes())
    (metadata / "cache" / "root_history" / "3.root.json").write_bytes(b"cut sho")
    (metadata / "cache" / "targets.json").write_bytes((keys.folder / "targets.json").read_bytes())
    assert cli.main(["root-authority"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "root version 2, provisioned 1, expires 2027-11-01T00:00:00Z"
    assert sorted(line.split()[0] for line in lines[2:-1]) == ["online", "releases", "root", "root-2", "targets"]
    assert lines[-1] == "signatures: root needs 2"
    assert cli.main(["-o", "json", "root-authority"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {key["key_id"] for key in document["keys"]} == {key.key_id for key in keys.list()}
    assert {key["name"]: key["roles"] for key in document["keys"]}["online"] == ["snapshot", "timestamp"]
    # Before a repository has led to a delegation, and when the kept one is damaged, the root alone is shown.
    (metadata / "cache" / "targets.json").write_bytes(b"cut sho")
    assert cli.main(["-o", "json", "root-authority"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {key["key_id"] for key in shown["keys"]} == set(keys.root().signed.keys)


def test_a_board_without_a_root_and_one_with_a_damaged_root_say_what_to_do(
    metadata: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (metadata / "root.json").write_bytes(b"{}")
    assert cli.main(["root-authority"]) != 0
    assert capsys.readouterr().err == (
        f"avocadoctl: cannot say whom this board trusts: {metadata / 'root.json'} does not read ('signed')\n"
        "  try: Provision this board again with 'avocadoctl provision'; its runtimes stay.\n"
    )
    (metadata / "root.json").unlink()
    assert cli.main(["root-authority"]) != 0
    assert capsys.readouterr().err == (
        "avocadoctl: cannot say whom this board trusts: it was not provisioned\n"
        "  try: On the host: avocadoctl provision --help\n"
    )

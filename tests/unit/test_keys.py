"""The signing keys: locked, private, never replaced."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from agent.contract.errors import ErrorCode, OperationError
from agent.host.first_keys import init_keys
from agent.host.keys import Keys, find_passphrase


def refused(call: object, *arguments: object, **options: object) -> OperationError:
    with pytest.raises(OperationError) as error:
        call(*arguments, **options)  # type: ignore[operator]
    assert error.value.code is ErrorCode.KEYS
    return error.value


def test_private_keys_are_locked_and_readable_by_nobody_else(tmp_path: Path) -> None:
    init_keys(tmp_path / "keys", b"correct horse")
    for path in (tmp_path / "keys").glob("*.pem"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert b"BEGIN ENCRYPTED PRIVATE KEY" in path.read_bytes()
    assert {key.name: key.encrypted for key in Keys(tmp_path / "keys").list()} == {
        "root": True,
        "targets": True,
        "releases": True,
        "online": True,
    }


def test_a_locked_key_opens_with_its_passphrase_only(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    init_keys(folder, b"correct horse")
    assert Keys(folder, b"correct horse").signer("targets").sign(b"x").signature
    path = folder / "targets.pem"
    assert refused(Keys(folder, b"battery staple").signer, "targets").message == (
        f"cannot sign with {path}: the passphrase is wrong"
    )
    error = refused(Keys(folder).signer, "targets")
    assert error.message == f"cannot sign with {path}: it is locked and there is no passphrase"
    assert error.remedy == "Set AVOCADO_KEYS_PASSPHRASE or give --passphrase-file FILE."


def test_keys_are_never_replaced(tmp_path: Path) -> None:
    init_keys(tmp_path, None)
    before = (tmp_path / "root.pem").read_bytes()
    assert refused(init_keys, tmp_path, None).message == (
        f"cannot make keys in {tmp_path}: it already holds online.pem, releases.pem, root.json, root.pem, "
        "targets.json, targets.pem"
    )
    assert (tmp_path / "root.pem").read_bytes() == before


def test_a_key_that_others_can_read_signs_nothing(tmp_path: Path) -> None:
    keys = init_keys(tmp_path, None)
    (tmp_path / "online.pem").chmod(0o644)
    error = refused(keys.signer, "timestamp")
    assert error.message == f"cannot sign with {tmp_path / 'online.pem'}: its mode 0644 lets others read it"
    assert error.remedy == f"Run: chmod 600 {tmp_path / 'online.pem'}"


def test_signing_without_the_root_key_works_and_with_a_missing_key_is_named(tmp_path: Path) -> None:
    keys = init_keys(tmp_path, None)
    (tmp_path / "root.pem").unlink()
    assert keys.signer("snapshot").sign(b"x").signature
    assert (
        refused(keys.signer, "root").message == f"cannot sign with {tmp_path / 'root.pem'}: No such file or directory"
    )
    assert [key.present for key in keys.list()] == [False, True, True, True]


def test_a_folder_without_the_delegation_lists_its_keys_and_says_where_to_get_it(tmp_path: Path) -> None:
    keys = init_keys(tmp_path, None)
    (tmp_path / "targets.json").unlink()
    assert [key.name for key in keys.list()] == ["root", "targets", "online"]
    error = refused(keys.signer, "releases")
    assert error.message == f"cannot use the keys in {tmp_path}: there is no targets.json"
    assert error.remedy == "Copy it from the folder that holds the targets key."
    (tmp_path / "targets.json").write_bytes(b"{}")
    assert refused(keys.signer, "releases").message == (
        f"cannot use {tmp_path / 'targets.json'}: it is not signed targets metadata"
    )


def test_no_passphrase_must_be_asked_for(tmp_path: Path) -> None:
    assert find_passphrase({}, None, without=True) is None
    assert find_passphrase({"AVOCADO_KEYS_PASSPHRASE": "abc"}, None, without=False) == b"abc"
    (tmp_path / "file").write_bytes(b"from a file\n")
    assert find_passphrase({}, tmp_path / "file", without=False) == b"from a file"
    assert refused(find_passphrase, {}, None, without=False).remedy == (
        "Set AVOCADO_KEYS_PASSPHRASE, or give --passphrase-file FILE, or say --no-passphrase."
    )
    assert refused(init_keys, tmp_path, b"short").message == (
        "cannot use this passphrase: it is shorter than 8 characters"
    )

"""Rotating, adding and revoking keys; thresholds that several people meet; a key in a token."""

from __future__ import annotations

import os
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from tuf.api.metadata import Metadata, Root

from agent.contract.errors import ErrorCode, OperationError
from agent.host.delegation import is_signed
from agent.host.first_keys import init_keys
from agent.host.key_changes import add, drop, revoke, rotate, sign
from agent.host.keys import Keys, key_named
from tests.device.host import find_program

NOW = datetime(2026, 11, 1, tzinfo=UTC)
MODULE = Path("/usr/lib/softhsm/libsofthsm2.so")


def names(keys: Keys, role: str) -> list[str]:
    return [key.name for key in keys.list() if role in key.roles]


def chain_holds(keys: Keys) -> bool:
    """Every version is signed as the one before it and it itself demand: what a board checks."""
    roots = [Metadata[Root].from_bytes(data) for _, data in sorted(keys.roots().items())]
    for before, after in zip([roots[0], *roots], roots, strict=False):
        for by in (before.signed, after.signed):
            by.verify_delegate("root", after.signed_bytes, after.signatures)
    return [root.signed.version for root in roots] == list(range(1, len(roots) + 1))


@pytest.mark.parametrize("name", ["root", "targets", "online"])
def test_a_rotated_key_is_another_key_under_the_old_name_and_the_old_one_is_kept_aside(
    tmp_path: Path, name: str
) -> None:
    keys = init_keys(tmp_path, b"correct horse", now=NOW)
    old = key_named(keys.root().signed, name)
    outcome = rotate(keys, name, now=NOW)
    assert (outcome.version, outcome.holds) == (2, True)
    new = key_named(keys.root().signed, name)
    assert new.keyid != old.keyid
    assert old.keyid not in keys.root().signed.keys
    assert (tmp_path / "retired" / f"{name}-{old.keyid[:8]}.pem").exists()
    assert b"ENCRYPTED" in (tmp_path / f"{name}.pem").read_bytes()
    assert chain_holds(keys)
    assert {role: keys.signer(role).public_key.keyid in keys.root().signed.roles[role].keyids for role in keys_roles()}
    assert not (tmp_path / "next").exists()


def keys_roles() -> tuple[str, ...]:
    return ("root", "targets", "snapshot", "timestamp")


def test_a_change_waits_until_as_many_root_keys_have_signed_as_both_roots_demand(tmp_path: Path) -> None:
    keys = init_keys(tmp_path / "a", None, root_keys=3, root_threshold=2, now=NOW)
    other = tmp_path / "b"
    shutil.copytree(tmp_path / "a", other)
    for name in ("root-2", "root-3"):
        (tmp_path / "a" / f"{name}.pem").unlink()
    (other / "root.pem").unlink()
    outcome = rotate(keys, "online", now=NOW)
    assert (outcome.holds, outcome.missing, outcome.signed_by) == (False, 1, ("root",))
    # Until then everything works as before.
    assert keys.root().signed.version == 1
    assert keys.signer("timestamp").sign(b"x").signature
    (other / "next").mkdir()
    shutil.copy(tmp_path / "a" / "next" / "root.json", other / "next")
    assert sign(Keys(other), now=NOW).holds
    shutil.copy(other / "root.json", tmp_path / "a" / "next" / "root.json")
    assert sign(keys, now=NOW).holds
    assert chain_holds(keys)
    assert keys.signer("timestamp").sign(b"x").signature


def test_a_second_change_waits_for_the_first_or_for_its_end(tmp_path: Path) -> None:
    keys = init_keys(tmp_path, None, root_keys=2, now=NOW)
    (tmp_path / "root-2.pem").unlink()
    assert not rotate(keys, "targets", now=NOW).holds
    with pytest.raises(OperationError) as error:
        rotate(keys, "online", now=NOW)
    assert error.value.message == (f"cannot change the keys in {tmp_path}: another change still waits for signatures")
    drop(keys)
    assert not rotate(keys, "online", now=NOW).holds


def test_each_release_signer_has_a_key_that_the_owner_adds_rotates_and_revokes_without_root(tmp_path: Path) -> None:
    keys = init_keys(tmp_path, b"correct horse", now=NOW)
    (tmp_path / "root.pem").unlink()
    first = keys.delegation().signed.version
    outcome = add(keys, "releases", "ci", now=NOW)
    assert (outcome.role, outcome.version, outcome.holds, outcome.signed_by) == (
        "targets",
        first + 1,
        True,
        ("targets",),
    )
    assert names(keys, "releases") == ["ci", "releases"]
    old = keys.signer("releases").public_key
    rotate(keys, "releases", now=NOW)
    assert (tmp_path / "retired" / f"releases-{old.keyid[:8]}.pem").exists()
    assert b"ENCRYPTED" in (tmp_path / "releases.pem").read_bytes()
    revoke(keys, "releases", now=NOW)
    assert names(keys, "releases") == ["ci"]
    assert keys.signer("releases").public_key.keyid == key_named(keys.delegation().signed, "ci").keyid
    with pytest.raises(OperationError) as error:
        revoke(keys, "ci", now=NOW)
    assert error.value.message == "cannot leave releases with 0 keys: 1 must sign"
    assert keys.root().signed.version == 1
    assert is_signed(keys)
    assert not (tmp_path / "next").exists()


def test_a_key_that_nobody_trusts_is_named_with_those_there_are(tmp_path: Path) -> None:
    keys = init_keys(tmp_path, None, now=NOW)
    for verb in (rotate, revoke):
        with pytest.raises(OperationError) as error:
            verb(keys, "ci", now=NOW)
        assert error.value.message == "cannot find key ci: there are online, releases, root, targets"
        assert error.value.remedy == "avocadoctl keys list"


def test_the_release_signers_change_only_where_the_targets_key_is(tmp_path: Path) -> None:
    keys = init_keys(tmp_path, None, now=NOW)
    (tmp_path / "targets.pem").unlink()
    before = (tmp_path / "targets.json").read_bytes()
    with pytest.raises(OperationError) as error:
        add(keys, "releases", "ci", now=NOW)
    assert error.value.message == f"cannot sign with {tmp_path / 'targets.pem'}: No such file or directory"
    assert (tmp_path / "targets.json").read_bytes() == before
    assert not (tmp_path / "ci.pem").exists()
    assert not (tmp_path / "next").exists()


def test_the_owner_signs_the_delegation_again_with_a_rotated_key_wherever_root_signed_it(tmp_path: Path) -> None:
    keys = init_keys(tmp_path / "owner", None, now=NOW)
    holder = tmp_path / "holder"
    shutil.copytree(tmp_path / "owner", holder)
    (tmp_path / "owner" / "root.pem").unlink()
    (holder / "targets.pem").unlink()
    assert not rotate(keys, "targets", now=NOW).holds
    (holder / "next").mkdir()
    shutil.copy(tmp_path / "owner" / "next" / "root.json", holder / "next")
    assert sign(Keys(holder), now=NOW).delegation is None
    assert not is_signed(Keys(holder))
    shutil.copy(holder / "root.json", tmp_path / "owner" / "next" / "root.json")
    outcome = sign(keys, now=NOW)
    assert (outcome.holds, outcome.delegation) == (True, keys.delegation().signed.version)
    assert is_signed(keys)


def test_a_targets_key_comes_and_goes_by_root_and_the_delegation_follows(tmp_path: Path) -> None:
    keys = init_keys(tmp_path, None, now=NOW)
    add(keys, "targets", "partner", now=NOW)
    assert revoke(keys, "targets", now=NOW).delegation == keys.delegation().signed.version
    assert names(keys, "targets") == ["partner"]
    assert is_signed(keys)
    with pytest.raises(OperationError) as error:
        revoke(keys, "partner", now=NOW)
    assert error.value.message == "cannot leave targets with 0 keys: 1 must sign"
    assert chain_holds(keys)


@pytest.mark.parametrize("group", ["root", "targets", "releases", "online"])
def test_one_name_is_one_key_whichever_document_names_it(tmp_path: Path, group: str) -> None:
    keys = init_keys(tmp_path, None, now=NOW)
    for taken in ("root", "targets", "releases", "online"):
        with pytest.raises(OperationError) as error:
            add(keys, group, taken, now=NOW)
        assert error.value.message == f"cannot add key {taken}: there is one"


def test_somebody_else_s_key_comes_as_its_public_half(tmp_path: Path) -> None:
    keys = init_keys(tmp_path / "keys", None, now=NOW)
    private = Ed25519PrivateKey.generate()
    file = tmp_path / "theirs.pem"
    file.write_bytes(private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    # Both must sign from now on, and the new one's private half is elsewhere: nothing holds yet.
    assert not add(keys, "root", "theirs", public=file, threshold=2, now=NOW).holds
    drop(keys)
    assert add(keys, "root", "theirs", public=file, now=NOW).holds
    assert {key.name: key.place for key in keys.list()}["theirs"] == "elsewhere"


def test_a_root_about_to_expire_is_renewed_by_signing_it(tmp_path: Path) -> None:
    keys = init_keys(tmp_path, None, now=NOW)
    later = datetime(2027, 10, 1, tzinfo=UTC)
    assert sign(keys, now=later).holds
    assert keys.root().signed.expires == datetime(2028, 9, 30, tzinfo=UTC)
    assert keys.delegation().signed.expires == datetime(2028, 9, 30, tzinfo=UTC)
    assert chain_holds(keys)


def test_who_holds_one_of_root_and_targets_renews_that_one(tmp_path: Path) -> None:
    keys = init_keys(tmp_path, None, now=NOW)
    later = datetime(2027, 10, 1, tzinfo=UTC)
    (tmp_path / "root.pem").rename(tmp_path / "away")
    outcome = sign(keys, now=later)
    assert (outcome.role, outcome.holds, keys.root().signed.version) == ("targets", True, 1)
    assert keys.delegation().signed.expires == datetime(2028, 9, 30, tzinfo=UTC)
    (tmp_path / "away").rename(tmp_path / "root.pem")
    (tmp_path / "targets.pem").unlink()
    outcome = sign(keys, now=later)
    assert (outcome.role, outcome.version, outcome.delegation) == ("root", 2, None)


@pytest.mark.parametrize("name", ["../x", "", "A", "x/y", "-x"])
def test_a_name_that_is_no_file_s_name_is_refused_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    keys = init_keys(tmp_path / "keys", None, now=NOW)
    with pytest.raises(OperationError) as error:
        add(keys, "targets", name, now=NOW)
    assert error.value.code is ErrorCode.KEYS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys"]
    assert not (tmp_path / "keys" / "next").exists()


@pytest.mark.parametrize(("count", "threshold"), [(0, None), (1, 2), (2, 0), (17, 1)])
def test_a_threshold_nobody_could_meet_is_refused(tmp_path: Path, count: int, threshold: int | None) -> None:
    with pytest.raises(OperationError) as error:
        init_keys(tmp_path / "keys", None, root_keys=count, root_threshold=threshold)
    assert error.value.code is ErrorCode.USAGE
    assert not (tmp_path / "keys").exists()


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A token in software with an ed25519 key, reached through PKCS#11 as a real one is."""
    programs = [find_program("softhsm2-util", "softhsm2"), find_program("pkcs11-tool", "opensc")]
    if None in programs or not MODULE.exists():
        pytest.skip("no token in software here, and none could be installed: apt-get install softhsm2 opensc")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "softhsm.conf").write_text(f"directories.tokendir = {tmp_path / 'tokens'}\n")
    monkeypatch.setenv("SOFTHSM2_CONF", str(tmp_path / "softhsm.conf"))
    monkeypatch.setenv("AVOCADO_PKCS11_PIN", "1234")
    tool = ["pkcs11-tool", "--module", str(MODULE), "--token-label", "avocado", "--login", "--pin", "1234"]
    for argv in (
        ["softhsm2-util", "--init-token", "--free", "--label", "avocado", "--pin", "1234", "--so-pin", "4321"],
        [*tool, "--keypairgen", "--key-type", "EC:edwards25519", "--label", "release"],
    ):
        subprocess.run(argv, check=True, capture_output=True, timeout=20, env=os.environ)
    return f"pkcs11:token=avocado;object=release?module-path={MODULE}"


# The first time, its programs are installed.
@pytest.mark.timeout(600)
def test_a_key_in_a_token_signs_releases_and_a_wrong_pin_is_named(
    tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = init_keys(tmp_path / "keys", None, now=NOW)
    assert add(keys, "releases", "hsm", uri=token, now=NOW).holds
    revoke(keys, "releases", now=NOW)
    signer = keys.signer("releases")
    signature = signer.sign(b"a release")
    signer.public_key.verify_signature(signature, b"a release")
    assert {key.name: key.place for key in keys.list()}["hsm"] == "uri"
    monkeypatch.setenv("AVOCADO_PKCS11_PIN", "9999")
    with pytest.raises(OperationError) as error:
        signer.sign(b"a release")
    assert error.value.message.startswith("cannot use release of token avocado: ")

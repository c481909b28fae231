"""What the host must offer before a board can run on it: root, a few kernel features, programs from Debian packages.

`obstacle` only looks and says why a board cannot run here; `install_tools` adds the missing packages with apt-get.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.device.process import BoardError, holds_within, run
from tests.device.progress import step

TOOLS = {
    "mmdebstrap": "mmdebstrap",
    "systemd-nspawn": "systemd-container",
    "nsenter": "util-linux",
    "ip": "iproute2",
    "zstd": "zstd",
    "ssh": "openssh-client",
    "mkfs.btrfs": "btrfs-progs",
    "mkfs.ext4": "e2fsprogs",
    "mount": "mount",
}


def obstacle() -> str | None:
    """The reason why no board can run on this host, or None."""
    if os.geteuid() != 0:
        return "the virtual board needs root"
    if not Path("/dev/loop-control").exists():
        return "the virtual board needs loop devices, and /dev/loop-control is missing"
    if not any(kind == "cgroup2" and os.access(point, os.W_OK) for point, kind, _ in mounts()):
        return "the virtual board needs a cgroup2 hierarchy that is mounted and writable"
    if _missing() and shutil.which("apt-get") is None:
        return f"the virtual board needs {', '.join(_missing())}, and there is no apt-get to install them with"
    return None


def install_tools() -> None:
    """Install the Debian packages whose programs are missing on this host."""
    missing = _missing()
    if not missing:
        return
    # The keyring comes along because an older one lacks the key of the release that the board runs.
    _install(sorted({TOOLS[name] for name in missing}), "debian-archive-keyring")


def find_program(name: str, package: str) -> str | None:
    """A program that single tests need: its path, from its Debian package if need be; None when it cannot be had."""
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    if shutil.which(name, path=places) is None and os.geteuid() == 0 and shutil.which("apt-get"):
        with suppress(BoardError):
            _install([package])
    return shutil.which(name, path=places)


def _install(packages: list[str], *besides: str) -> None:
    # RUNLEVEL: a server that is installed for a test is not to start by itself.
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    apt = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300"]
    # apt-get waits for dpkg's lock by itself, but not for the one on the package lists.
    with locked(Path("/run/lock/avocado-apt")), step(f"installing {' '.join(packages)}"):
        run([*apt, "update"], doing="read the package lists", timeout_s=300, env=quiet)
        install = [*apt, "install", "-y", "--no-install-recommends", *packages, *besides]
        run(install, doing=f"install {' '.join(packages)}", timeout_s=600, env=quiet)


def _missing() -> list[str]:
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return [name for name in TOOLS if shutil.which(name, path=places) is None]


def mounts() -> Iterator[tuple[Path, str, str]]:
    """Mount point, file system type and super block options of everything this process sees mounted."""
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        # The kernel writes blanks and the like in octal.
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields.split(" ")[4])
        yield Path(point), kind, options


def is_mounted(point: Path) -> bool:
    """Whether something is mounted at that very path, be it only the same file system once more."""
    return any(found == point for found, _, _ in mounts())


def mounts_below(folder: Path) -> list[Path]:
    """Mount points in `folder`, itself included, in the order in which they can be unmounted."""
    return [point for point, _, _ in mounts() if point == folder or folder in point.parents][::-1]


@contextmanager
def locked(path: Path, *, timeout_s: float = 300) -> Iterator[None]:
    """Hold an exclusive lock on `path` among all processes of this host."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:

        def taken() -> bool:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        if not holds_within(taken, timeout_s):
            raise BoardError(f"cannot go on: another process has held {path} for {timeout_s:g} s")
        yield

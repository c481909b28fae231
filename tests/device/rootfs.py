"""The board's root file system, made once per list of packages and kept outside the work tree.

`$AVOCADO_CACHE/board-<suite>-<hash>/` holds three forms of it, each made when it is first asked for: the tarball that
mmdebstrap makes, the disk that every new board copies, and the unpacked tree. Out of that tree the board's own Python
runs on the host, without chroot or mounts, to compile bytecode for it. `python3 -m tests.device.rootfs` prints its
path.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from tests.device.disk import make_template, remove_folder
from tests.device.host import install_tools, locked, obstacle
from tests.device.process import BoardError, run
from tests.device.progress import step
from tests.device.slots import WORK

SUITE = "trixie"
PACKAGES = (
    # The system. Without libpam-systemd, polkitd's need for a logind is met by another package.
    "systemd", "systemd-sysv", "dbus", "libpam-systemd", "libnss-systemd", "polkitd", "udev",
    # What the agent and the pose service take from the base.
    "python3", "python3-systemd", "kmod", "util-linux", "ca-certificates",
    # Reaching the board, and looking into it.
    "openssh-server", "iproute2", "procps", "strace", "erofs-utils",
)  # fmt: skip
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*")
CUSTOMIZE = (
    # A user without rights, besides root.
    'chroot "$1" useradd --create-home --shell /bin/bash oper',
    # Each board gets host keys and a machine id of its own.
    'rm -f "$1"/etc/ssh/ssh_host_*',
    # Debian's own timers would fetch package lists and trim the disk in the middle of a test.
    'rm "$1"/etc/systemd/system/timers.target.wants/*.timer',
    'mkdir -p "$1"/var/log/journal "$1"/etc/systemd/journald.conf.d',
    'printf "[Journal]\\nStorage=persistent\\nSystemMaxUse=64M\\nRateLimitBurst=0\\n"'
    ' >"$1"/etc/systemd/journald.conf.d/board.conf',
)


def template() -> Path:
    """The prepared disk, ready to be copied."""
    return _made("disk.pool", lambda path: make_template(tarball(), path, WORK / "template"), "preparing the disk")


def tarball() -> Path:
    """The root file system as mmdebstrap makes it."""
    return _made("root.tar.zst", _bootstrap, f"building Debian {SUITE} for the board (once, about a minute)")


def board_python() -> Path:
    """A program that runs the board's Python on this host: same version, same bytecode."""
    return _made("root", _unpack, "unpacking the root file system") / "host-python3"


def _bootstrap(path: Path) -> None:
    # Below WORK, so that what a killed mmdebstrap leaves mounted is found and removed by the next one.
    scratch = WORK / "bootstrap"
    scratch.mkdir(parents=True)
    half = path.with_name(f"new.{path.name}")
    argv = [
        "mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}",
        '--aptopt=Acquire::Languages "none"',
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT),
        *(f"--customize-hook={command}" for command in CUSTOMIZE),
        SUITE, str(half),
        *os.environ.get("AVOCADO_DEBIAN_MIRROR", "").split(),
    ]  # fmt: skip
    run(argv, doing="build the root file system", timeout_s=900, env={**os.environ, "TMPDIR": str(scratch)})
    half.replace(path)


def _unpack(path: Path) -> None:
    half = path.with_name("new.root")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir()
    unpack = ["tar", "-C", str(half), "--zstd", "--exclude=./dev/*", "-xf", str(tarball())]
    run(unpack, doing="unpack the root file system", timeout_s=300)
    _write_host_python(half, path)
    half.replace(path)


def _write_host_python(tree: Path, final: Path) -> None:
    """The tree's interpreter through the tree's own loader: neither depends on what the host has."""
    version = (tree / "usr/bin/python3").readlink().name
    loader = next(tree.glob("usr/lib/*-linux-gnu/ld-linux-*.so.*")).relative_to(tree)
    python = tree / "host-python3"
    python.write_text(
        "#!/bin/sh\n"
        "unset PYTHONPATH PYTHONSAFEPATH\n"
        f'export PYTHONHOME="{final}/usr" PYTHONNOUSERSITE=1\n'
        f'exec "{final / loader}" --inhibit-cache --argv0 "$0" --library-path "{final / loader.parent}"'
        f' "{final}/usr/bin/{version}" "$@"\n'
    )
    python.chmod(0o755)


def _made(name: str, make: Callable[[Path], None], saying: str) -> Path:
    path = _cache() / name
    if not path.exists():
        if (reason := obstacle()) is not None:
            raise BoardError(f"cannot make {path}: {reason}")
        if name != "root.tar.zst":
            tarball()
        with locked(WORK / "rootfs.lock", timeout_s=1800):
            if not path.exists():
                install_tools()
                _remove_scratch()
                try:
                    with step(saying):
                        make(path)
                finally:
                    _remove_scratch()
    return path


def _remove_scratch() -> None:
    for name in ("bootstrap", "template"):
        remove_folder(WORK / name)


def _cache() -> Path:
    recipe = repr((SUITE, PACKAGES, LEFT_OUT, CUSTOMIZE)).encode()
    root = Path(os.environ.get("AVOCADO_CACHE") or Path.home() / ".cache/avocado")
    folder = root / f"board-{SUITE}-{hashlib.sha256(recipe).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    try:
        print(board_python())
    except BoardError as error:
        sys.exit(f"rootfs: {error}")

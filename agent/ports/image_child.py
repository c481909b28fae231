"""A child process that mounts one image where nobody else sees it, and answers one question about it.

Started by ports/images.py with a request on stdin: `image`, and either `kind` and `name`, for the text of its
extension-release file, or `paths`, for those of them at which it has a file. The image is untrusted: it is mounted
read-only without devices, set-uid or execution, in a private mount namespace that dies with this process; inside it
every path component is opened without following links; what is read is bounded. Needs CAP_SYS_ADMIN. It answers with
one JSON object, `answer` or `error`, and imports nothing but the standard library and ports/mounts.py.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from typing import Any

from agent.ports.mounts import MS_NODEV, MS_NOEXEC, MS_NOSUID, RefusedError, mount_image, own_namespace

MAX_RELEASE_BYTES = 64 * 1024
_FOLDERS = {"sysext": ("usr", "lib", "extension-release.d"), "confext": ("etc", "extension-release.d")}


def main(argv: list[str]) -> int:
    """Print what was found, as JSON."""
    request = json.load(sys.stdin)
    try:
        own_namespace()
        descriptor = open_image(request["image"])
        # /tmp exists everywhere, and in this namespace nobody else looks at it.
        mount_image(descriptor, "/tmp", MS_NOSUID | MS_NODEV | MS_NOEXEC)  # noqa: S108
        answer = {"answer": _answer("/tmp", request)}  # noqa: S108
    except RefusedError as refused:
        answer = {"error": str(refused)}
    except OSError as cause:
        answer = {"error": said(cause)}
    json.dump(answer, sys.stdout)
    return 0


def _answer(where: str, request: dict[str, Any]) -> str | list[str]:
    if "paths" not in request:
        return read_release(where, request["kind"], request["name"])
    root = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return [path for path in request["paths"] if _has_file(root, path)]


def said(cause: OSError) -> str:
    """An operating system's error in words."""
    return f"{cause.strerror}" + (f" ({cause.filename})" if cause.filename else "")


def open_image(image: str) -> int:
    """A descriptor of the image, which is a plain file."""
    descriptor = os.open(image, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise RefusedError("it is not a plain file")
    return descriptor


def read_release(where: str, kind: str, name: str) -> str:
    """The text of the release file in the image that is mounted at `where`."""
    root = os.open(where, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if kind == "sysext" and _is_there(root, ("usr", "lib"), "os-release"):
        raise RefusedError("it carries usr/lib/os-release, so systemd takes it for a whole system")
    folder = _walk(root, _FOLDERS[kind])
    if folder is None:
        raise RefusedError(f"it has no {'/'.join(_FOLDERS[kind])}")
    release = f"extension-release.{name}"
    entries = [entry for entry in os.listdir(folder) if entry.startswith("extension-release.")]  # noqa: PTH208
    if release not in entries:
        raise RefusedError(f"it has no release file {release}")
    for entry in entries:
        # systemd reads the file that has the link's name, NN- and all; it must not say something else than ours.
        if entry != release and not _is_alias(folder, entry, release):
            raise RefusedError(f"it has a second release file {entry}")
    return _read_file(folder, release)


def _is_alias(folder: int, entry: str, release: str) -> bool:
    try:
        target = os.readlink(entry, dir_fd=folder)
    except OSError as cause:
        if cause.errno == errno.EINVAL:  # no symbolic link
            return False
        raise
    return target == release


def _read_file(folder: int, name: str) -> str:
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise RefusedError(f"{name} is not a plain file")
    try:
        strict = os.getxattr(descriptor, "user.extension-release.strict")
    except OSError as cause:
        if cause.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise
        strict = b""
    if strict != b"0":
        # Links carry NN- before the name, and without this attribute systemd insists on the file name's.
        raise RefusedError(f"{name} lacks the attribute user.extension-release.strict=0")
    data = os.read(descriptor, MAX_RELEASE_BYTES + 1)
    if len(data) > MAX_RELEASE_BYTES:
        raise RefusedError(f"{name} is larger than {MAX_RELEASE_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as cause:
        raise RefusedError(f"{name} is not UTF-8") from cause


def _walk(root: int, parts: tuple[str, ...]) -> int | None:
    folder = os.dup(root)
    for part in parts:
        above = folder
        try:
            folder = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=above)
        except FileNotFoundError:
            return None
        except OSError as cause:
            if cause.errno in (errno.ELOOP, errno.ENOTDIR):
                raise RefusedError(f"{'/'.join(parts)} leads through something that is not a folder") from cause
            raise
        finally:
            os.close(above)
    return folder


def _is_there(root: int, parts: tuple[str, ...], name: str) -> bool:
    folder = _walk(root, parts)
    if folder is None:
        return False
    try:
        os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _has_file(root: int, path: str) -> bool:
    *parts, name = path.strip("/").split("/")
    try:
        folder = _walk(root, tuple(parts))
    except RefusedError:
        return False  # a mapped file's path has no link in it
    if folder is None:
        return False
    try:
        return stat.S_ISREG(os.lstat(name, dir_fd=folder).st_mode)
    except FileNotFoundError:
        return False
    finally:
        os.close(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv))

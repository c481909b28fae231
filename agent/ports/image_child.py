"""A child process that mounts one image where nobody else sees it, and prints its extension-release file.

Run as a script, `python3 -I image_child.py IMAGE KIND NAME`, by ports/images.py. The image is untrusted: it is mounted
read-only without devices, set-uid or execution, in a private mount namespace that dies with this process; inside it
every path component is opened without following links; what is read is bounded. Needs CAP_SYS_ADMIN. It answers with
one JSON object: `release` (the file's text) or `error`, and imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import stat
import struct
import sys

MAX_RELEASE_BYTES = 64 * 1024
_FOLDERS = {"sysext": ("usr", "lib", "extension-release.d"), "confext": ("etc", "extension-release.d")}

_CLONE_NEWNS = 0x00020000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 1, 2, 4, 8, 16384, 1 << 18
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_LO_FLAGS_READ_ONLY, _LO_FLAGS_AUTOCLEAR = 1, 4
_LOOP_CONFIG = "II" + "QQQQQIIII64s64s32s2Q" + "8Q"  # struct loop_config: fd, block_size, loop_info64, reserved
_ATTEMPTS = 5

_libc = ctypes.CDLL(None, use_errno=True)


class RefusedError(Exception):
    """The image is not one that can be merged."""


def main(argv: list[str]) -> int:
    """Print what was found, as JSON."""
    image, kind, name = argv[1:4]
    try:
        _own_namespace()
        _mount_image(image)
        answer = {"release": _read_release(kind, name)}
    except RefusedError as refused:
        answer = {"error": str(refused)}
    except OSError as cause:
        answer = {"error": f"{cause.strerror}" + (f" ({cause.filename})" if cause.filename else "")}
    json.dump(answer, sys.stdout)
    return 0


def _own_namespace() -> None:
    if _libc.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "no private mount namespace: " + os.strerror(ctypes.get_errno()))
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)


def _mount(what: str | None, where: str, kind: str | None, flags: int) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (what, where, kind)]
    if _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), None) != 0:
        code = ctypes.get_errno()
        raise OSError(code, "it does not mount: " + os.strerror(code))


def _mount_image(image: str) -> None:
    descriptor = os.open(image, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RefusedError("it is not a plain file")
        kind = _file_system(descriptor)
        loop, device = _attach(descriptor)
        try:
            # /tmp exists everywhere, and in this namespace nobody else looks at it.
            _mount(device, "/tmp", kind, _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)  # noqa: S108
        finally:
            os.close(loop)  # detaches by itself once nothing holds it
    finally:
        os.close(descriptor)


def _file_system(descriptor: int) -> str:
    head = os.pread(descriptor, 1152, 0)
    if head[:4] == b"hsqs":
        name, size = "squashfs", struct.unpack_from("<Q", head, 40)[0]
    elif len(head) == 1152 and head[1024:1028] == struct.pack("<I", 0xE0F5E1E2):
        name, size = "erofs", struct.unpack_from("<I", head, 1024 + 36)[0] << min(head[1024 + 12], 16)
    else:
        raise RefusedError("it is neither EROFS nor squashfs")
    # The kernel mounts an image that was cut off, and finds out when somebody reads what is missing.
    if os.fstat(descriptor).st_size < size:
        raise RefusedError(f"it is cut off: {os.fstat(descriptor).st_size} of {size} bytes")
    return name


def _attach(descriptor: int) -> tuple[int, str]:
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(_ATTEMPTS):
            device = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            loop = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
            flags = _LO_FLAGS_READ_ONLY | _LO_FLAGS_AUTOCLEAR
            config = struct.pack(_LOOP_CONFIG, descriptor, 0, *[0] * 8, flags, b"", b"", b"", 0, 0, *[0] * 8)
            try:
                fcntl.ioctl(loop, _LOOP_CONFIGURE, config)
            except OSError as cause:
                os.close(loop)
                if cause.errno == errno.EBUSY:  # somebody else was faster
                    continue
                raise
            return loop, device
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "no free loop device")


def _read_release(kind: str, name: str) -> str:
    root = os.open("/tmp", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # noqa: S108
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
    folder = root
    for part in parts:
        try:
            folder = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError as cause:
            if cause.errno in (errno.ELOOP, errno.ENOTDIR):
                raise RefusedError(f"{'/'.join(parts)} leads through something that is not a folder") from cause
            raise
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


if __name__ == "__main__":
    sys.exit(main(sys.argv))

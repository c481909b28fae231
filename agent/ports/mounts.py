"""The kernel's mount API: namespaces, mounts that are not attached yet, loop devices, and what is mounted where.

Only what the agent's child processes need, through libc and with the numbers that x86_64 and aarch64 share. It imports
nothing but the standard library, because a child carries this file's text with it. Everything raises OSError with what
was attempted in its text.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from dataclasses import dataclass

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 16384, 1 << 18
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8  # of fsmount
BENEATH = 0x200

_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 428, 429, 430, 431, 432
_CLONE_NEWNS, _AT_FDCWD, _AT_RECURSIVE = 0x00020000, -100, 0x8000
_OPEN_TREE_CLONE, _MOVE_FROM_FD, _CLOEXEC = 1, 0x4, 1
_SET_FLAG, _SET_STRING, _CREATE = 0, 1, 6
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
_LO_FLAGS_READ_ONLY, _LO_FLAGS_AUTOCLEAR = 1, 4
_LOOP_CONFIG = "II" + "QQQQQIIII64s64s32s2Q" + "8Q"  # struct loop_config: fd, block_size, loop_info64, reserved
_ATTEMPTS = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _call(what: str, number: int, *arguments: int | str | None) -> int:
    passed = [ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(_encoded(a)) for a in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *passed), what)


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else os.fsencode(text)


# -- namespaces


def enter_namespace(descriptor: int) -> None:
    """This process, which has one thread, lives in that mount namespace, at its root."""
    _checked(_libc.setns(descriptor, _CLONE_NEWNS), "the mount namespace cannot be entered")


def own_namespace() -> None:
    """What this process mounts from here on is seen by nobody else, and gone when it ends."""
    _checked(_libc.unshare(_CLONE_NEWNS), "no private mount namespace")
    mount(None, "/", None, MS_REC | MS_PRIVATE)


# -- mounts at a path


def mount(what: str | None, where: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2)."""
    passed = [_encoded(text) for text in (what, where, kind)]
    result = _libc.mount(*passed, ctypes.c_ulong(flags), _encoded(options))
    _checked(result, "it does not mount")


def unmount(where: str) -> None:
    """The topmost mount at `where` is detached; what is open in it stays."""
    _checked(_libc.umount2(_encoded(where), _MNT_DETACH | _UMOUNT_NOFOLLOW), f"{where} cannot be unmounted")


# -- mounts that are made first and attached later


def new_mount(kind: str, options: list[tuple[str, str]], attributes: int) -> int:
    """A descriptor of a new, unattached, read-only mount."""
    context = _call(f"no file system {kind}", _FSOPEN, kind, _CLOEXEC)
    try:
        for key, value in options:
            _call(f"{kind} refuses {key}={value}", _FSCONFIG, context, _SET_STRING, key, value, 0)
        _call(f"{kind} refuses ro", _FSCONFIG, context, _SET_FLAG, "ro", None, 0)
        _call(f"{kind} cannot be made", _FSCONFIG, context, _CREATE, None, None, 0)
        return _call(f"{kind} cannot be mounted", _FSMOUNT, context, _CLOEXEC, attributes)
    finally:
        os.close(context)


def copy_of(where: str) -> int:
    """A descriptor of an unattached copy of the mount at `where` and all below it."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_RECURSIVE
    return _call(f"{where} cannot be copied", _OPEN_TREE, _AT_FDCWD, where, flags)


def attach(descriptor: int, where: str, flags: int = 0) -> None:
    """The unattached mount is at `where`; with BENEATH, hidden below what is topmost there."""
    how = "below" if flags & BENEATH else "on"
    what = f"the new mount cannot be put {how} {where}"
    _call(what, _MOVE_MOUNT, descriptor, "", _AT_FDCWD, where, _MOVE_FROM_FD | flags)


# -- images


class RefusedError(Exception):
    """The image is not one that can be merged."""


def file_system(descriptor: int) -> str:
    """`erofs` or `squashfs`, of an image that is as long as it says it is."""
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


def mount_image(descriptor: int, where: str, flags: int) -> None:
    """The image is mounted read-only at `where`, through a loop device that detaches by itself."""
    kind = file_system(descriptor)
    loop, device = _loop(descriptor)
    try:
        mount(device, where, kind, MS_RDONLY | flags)
    finally:
        os.close(loop)


def _loop(descriptor: int) -> tuple[int, str]:
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


# -- what is mounted where


@dataclass(frozen=True, slots=True)
class Mounted:
    """One line of mountinfo."""

    number: int
    parent: int
    where: str
    kind: str
    source: str


def mounted(process: str = "self") -> list[Mounted]:
    """Every mount that a process sees, in the order of their making."""
    with open(f"/proc/{process}/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:  # noqa: PTH123
        return [_parsed(line) for line in stream]


def _parsed(line: str) -> Mounted:
    first, _, second = line.partition(" - ")
    place, origin = first.split(" "), second.split(" ")
    return Mounted(int(place[0]), int(place[1]), _plain(place[4]), origin[0], origin[1])


def _plain(text: str) -> str:
    for escaped, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(escaped, character)
    return text


def stacked(mounts: list[Mounted], where: str, source: str) -> int:
    """How many overlays of that source lie at `where`, one on top of the other."""
    return sum(1 for m in mounts if m.where == where and m.kind == "overlay" and m.source == source)

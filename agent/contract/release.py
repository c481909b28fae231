"""The extension-release file: which board an extension is for, and what it asks of a merge.

Pure, and free of every library, since the child process that switches the overlay carries this text with it.
Compatibility follows systemd's `extension_release_validate()` (src/shared/extension-util.c, v257), because systemd
ignores an incompatible image with exit status 0: whoever merges has to know before.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from enum import StrEnum

from agent.contract.errors import ErrorCode, OperationError

MAX_RELEASE_BYTES = 64 * 1024
ARCHITECTURES: Mapping[str, str] = {"x86_64": "x86-64", "aarch64": "arm64"}  # ours -> systemd's


class Kind(StrEnum):
    """What an extension merges over."""

    SYSEXT = "sysext"  # /usr and /opt
    CONFEXT = "confext"  # /etc


def parse_release(data: bytes, where: str) -> dict[str, str]:
    """The keys of an extension-release or os-release file. Raises `bad-image` naming `where` and the line."""
    if len(data) > MAX_RELEASE_BYTES:
        raise _bad(where, f"{len(data)} bytes, limit {MAX_RELEASE_BYTES}")
    try:
        lines = data.decode().splitlines()
    except UnicodeDecodeError as cause:
        raise _bad(where, "it is not UTF-8") from cause
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        key, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise _bad(where, f"line {number} is not KEY=value")
        try:
            keys[key] = " ".join(shlex.split(value))
        except ValueError as cause:
            raise _bad(where, f"line {number}: {cause}") from cause
    return keys


def _bad(where: str, why: str) -> OperationError:
    return OperationError(
        ErrorCode.BAD_IMAGE, f"cannot read {where}: {why}", "Build the extension again with 'avocadoctl build'."
    )


def incompatibility(release: Mapping[str, str], kind: Kind, os_release: Mapping[str, str], arch: str) -> str | None:
    """Why systemd would ignore this image on this board, or None. `arch` is x86_64 or aarch64."""
    architecture = release.get("ARCHITECTURE", "")
    ours = ARCHITECTURES.get(arch, arch)
    if architecture and architecture not in ("_any", ours):
        return f"ARCHITECTURE={architecture}, the board is {ours}"
    scopes = release.get(f"{kind.value.upper()}_SCOPE", "").split()
    if scopes and "system" not in scopes:
        return f"{kind.value.upper()}_SCOPE={' '.join(scopes)} leaves out system"
    wanted_id, board_id = release.get("ID", ""), os_release.get("ID", "")
    if wanted_id == "_any":
        return None
    if not wanted_id:
        return "its release file has no ID"
    if wanted_id != board_id and wanted_id not in os_release.get("ID_LIKE", "").split():
        return f"ID={wanted_id}, the board is {board_id}"
    return _version_mismatch(release, kind, os_release)


def _version_mismatch(release: Mapping[str, str], kind: Kind, os_release: Mapping[str, str]) -> str | None:
    level_key = f"{kind.value.upper()}_LEVEL"
    board_level, board_version = os_release.get(level_key, ""), os_release.get("VERSION_ID", "")
    level, version = release.get(level_key, ""), release.get("VERSION_ID", "")
    if board_level and level:
        return None if level == board_level else f"{level_key}={level}, the board has {board_level}"
    if board_version and version != board_version:
        said = f"VERSION_ID={version}" if version else "its release file has no VERSION_ID"
        return f"{said}, the board is {board_version}"
    return None


_UNIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_.@\\-]*\.(service|socket|timer|path|target|mount)")


def owned_services(release: Mapping[str, str]) -> tuple[str, ...]:
    """The units an extension owns: AVOCADO_ENABLE_SERVICES and systemd's EXTENSION_RESTART_UNITS, in that order."""
    words = f"{release.get('AVOCADO_ENABLE_SERVICES', '')} {release.get('EXTENSION_RESTART_UNITS', '')}"
    names = [word if "." in word else f"{word}.service" for word in re.split(r"[\s,;]+", words) if word]
    for name in names:
        if not _UNIT.fullmatch(name):
            raise _bad("the extension's services", f"{name!r} is no unit name")
    return tuple(dict.fromkeys(names))


def modules(release: Mapping[str, str]) -> tuple[str, ...]:
    """AVOCADO_MODPROBE: the kernel modules to load after a merge."""
    names = tuple(word for word in re.split(r"[\s,;]+", release.get("AVOCADO_MODPROBE", "")) if word)
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name):
            raise _bad("the extension's modules", f"{name!r} is no module name")
    return names


def commands(release: Mapping[str, str], key: str) -> list[list[str]]:
    """AVOCADO_ON_MERGE or AVOCADO_ON_UNMERGE: `;`-separated commands, each an argument list; no shell reads them."""
    found: list[list[str]] = []
    for part in release.get(key, "").split(";"):
        try:
            argv = shlex.split(part)
        except ValueError as cause:
            raise _bad(key, str(cause)) from cause
        if argv:
            found.append(argv)
    return found

"""Extensions as the board sees them: installed, merged, wanted, and the difference, with every problem named.

Pure: it takes what the store, systemd and the active runtime say and returns values. It promises that nothing is
adopted by half: an image that systemd merged and the runtime does not list is a problem with a remedy, never an
extension of ours. Compatibility follows systemd's `extension_release_validate()` (src/shared/extension-util.c, v257),
because systemd ignores an incompatible image with exit status 0: the agent has to know before.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Extension, Manifest

MAX_RELEASE_BYTES = 64 * 1024
ARCHITECTURES: Mapping[str, str] = {"x86_64": "x86-64", "aarch64": "arm64"}  # ours -> systemd's


class Kind(StrEnum):
    """What an extension merges over."""

    SYSEXT = "sysext"  # /usr and /opt
    CONFEXT = "confext"  # /etc


@dataclass(frozen=True, slots=True)
class MergedSet:
    """What is merged now: per kind, the merged link names without `.raw`, lowest first (`["95-pose-model", ...]`)."""

    names: Mapping[Kind, tuple[str, ...]]
    since: Mapping[Kind, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExtensionView:
    """One extension from both sides. `origin` is `runtime`, `other-runtime` (on disk only) or `foreign`."""

    name: str
    version: str
    image_id: str
    sha256: str
    types: tuple[Kind, ...]
    origin: str
    wanted: bool
    installed: bool
    merged: tuple[Kind, ...]
    merge_name: str
    services: tuple[str, ...]

    @property
    def is_merged(self) -> bool:
        """Merged over everything it is meant for."""
        return bool(self.types) and set(self.types) <= set(self.merged)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it should be, and what to type next."""

    code: str
    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class ExtensionsReport:
    """Every extension, in merge order, and what is wrong with the set."""

    extensions: tuple[ExtensionView, ...]
    problems: tuple[Problem, ...]


Releases = Mapping[str, Mapping[Kind, Mapping[str, str]]]  # image id -> kind -> extension-release keys


def compare(
    wanted: Manifest | None,
    merged: MergedSet,
    *,
    held: Iterable[str],
    releases: Releases,
    others: Sequence[Manifest] = (),
    strays: Sequence[str] = (),
) -> ExtensionsReport:
    """Installed (`held` image ids), merged and wanted, put beside one another.

    `wanted` is the manifest whose set should run: the active one, or a change's during its trial. `others` are the
    further runtimes on disk; `strays` are paths in our folders that no manifest names.
    """
    held = frozenset(held)
    views: list[ExtensionView] = []
    problems: list[Problem] = []
    listed = list(wanted.extensions) if wanted else []
    for extension in listed:
        link = wanted.link_name(extension).removesuffix(".raw") if wanted else ""
        view = _view(extension, "runtime", link, merged, held, releases)
        views.append(view)
        problems.extend(_problems_of(view))
    known = {view.image_id for view in views}
    for manifest in others:
        for extension in manifest.extensions:
            if extension.image_id in held and extension.image_id not in known:
                known.add(extension.image_id)
                views.append(_view(extension, "other-runtime", "", merged, held, releases))
    expected = {(kind, view.merge_name) for view in views if view.wanted for kind in view.types}
    other_links = {m.link_name(e).removesuffix(".raw") for m in others for e in m.extensions}
    for kind, names in merged.names.items():
        for name in names:
            if (kind, name) not in expected:
                views.append(_foreign(name, kind))
                problems.append(_unwanted(name, kind, ours=name in other_links))
    problems.extend(
        Problem("stray-file", f"{path} is no image of ours and is never merged", f"Move {path} elsewhere.")
        for path in strays
    )
    return ExtensionsReport(tuple(views), tuple(problems))


def _view(
    extension: Extension, origin: str, link: str, merged: MergedSet, held: frozenset[str], releases: Releases
) -> ExtensionView:
    types = tuple(Kind(kind) for kind in extension.types)
    keys = releases.get(extension.image_id, {})
    return ExtensionView(
        name=extension.name,
        version=extension.version,
        image_id=extension.image_id,
        sha256=extension.sha256,
        types=types,
        origin=origin,
        wanted=origin == "runtime",
        installed=extension.image_id in held,
        merged=tuple(kind for kind in types if link and link in merged.names.get(kind, ())),
        merge_name=link,
        services=tuple(dict.fromkeys(unit for kind in types for unit in owned_services(keys.get(kind, {})))),
    )


def _foreign(name: str, kind: Kind) -> ExtensionView:
    return ExtensionView(
        name=name,
        version="",
        image_id="",
        sha256="",
        types=(kind,),
        origin="foreign",
        wanted=False,
        installed=False,
        merged=(kind,),
        merge_name=name,
        services=(),
    )


def _problems_of(view: ExtensionView) -> list[Problem]:
    if not view.installed:
        return [
            Problem(
                "image-missing",
                f"extension {view.name} {view.version}: its image {view.image_id} is not on the board",
                "Deploy this runtime again from the host.",
            )
        ]
    missing = [kind.value for kind in view.types if kind not in view.merged]
    if missing:
        return [
            Problem(
                "not-merged",
                f"extension {view.name} {view.version} is wanted but not merged ({', '.join(missing)})",
                "Run 'avocadoctl refresh'.",
            )
        ]
    return []


def _unwanted(name: str, kind: Kind, *, ours: bool) -> Problem:
    if ours:
        return Problem(
            "merged-not-wanted",
            f"{kind.value} {name} is merged but the active runtime does not list it",
            "Run 'avocadoctl refresh'.",
        )
    return Problem(
        "foreign-merged",
        f"{kind.value} {name} is merged and was not put there by the agent",
        f"Move its image out of the folders of systemd-{kind.value}, then run 'avocadoctl refresh'.",
    )


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

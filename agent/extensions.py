"""Extensions as the board sees them: installed, merged, wanted, and the difference, with every problem named.

Pure: it takes what the store, systemd and the active runtime say and returns values. It promises that nothing is
adopted by half: an image that systemd merged and the runtime does not list is a problem with a remedy, never an
extension of ours. What an image says about itself is read by contract/release.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from agent.contract.manifest import Extension, Manifest
from agent.contract.release import Kind as Kind
from agent.contract.release import commands as commands
from agent.contract.release import incompatibility as incompatibility
from agent.contract.release import modules as modules
from agent.contract.release import owned_services as owned_services
from agent.contract.release import parse_release as parse_release


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

"""Extensions as the board sees them: installed, merged, wanted, and the difference, with every problem named.

Pure: it takes what the store, systemd and the active runtime say and returns values. It promises that nothing is
adopted by half: an image that systemd merged and the runtime does not list is a problem with a remedy, never an
extension of ours. What an image says about itself is read by contract/release.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent.contract.local import signed
from agent.contract.manifest import Extension, Manifest
from agent.contract.release import Kind as Kind
from agent.contract.release import commands as commands
from agent.contract.release import incompatibility as incompatibility
from agent.contract.release import modules as modules
from agent.contract.release import owned_services as owned_services
from agent.contract.release import parse_release as parse_release


@dataclass(frozen=True, slots=True)
class MergedSet:
    """What is merged now: per kind, the merged link names without `.raw`, lowest first (`["95-pose-model", ...]`).

    `images`: per kind, the image id of every name; a kind is left out where that is not known.
    """

    names: Mapping[Kind, tuple[str, ...]]
    since: Mapping[Kind, str] = field(default_factory=dict)
    images: Mapping[Kind, Mapping[str, str]] = field(default_factory=dict)

    def is_exactly(self, manifest: Manifest) -> bool:
        """Whether these are the names of this runtime and no other, and its images, as far as those are known."""
        images = {manifest.link_name(e).removesuffix(".raw"): e.image_id for e in manifest.extensions}
        wanted = {(Kind(k), manifest.link_name(e).removesuffix(".raw")) for e in manifest.extensions for k in e.types}
        return wanted == {(kind, name) for kind, names in self.names.items() for name in names} and all(
            images.get(name) == image for known in self.images.values() for name, image in known.items()
        )

    def is_within(self, manifest: Manifest | None) -> bool:
        """Whether no other names are merged than this runtime's."""
        known = merge_names(manifest) if manifest else {}
        return all(set(names) <= set(known.get(kind.value, ())) for kind, names in self.names.items())


def merge_names(manifest: Manifest) -> dict[str, list[str]]:
    """What systemd calls a runtime's extensions once they are merged, per kind, lowest first."""
    links: dict[str, list[str]] = {kind.value: [] for kind in Kind}
    for extension in manifest.extensions:
        for kind in extension.types:
            links[kind].append(manifest.link_name(extension).removesuffix(".raw"))
    return {kind: sorted(names) for kind, names in links.items() if names}


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
    disabled: bool = False  # of the signed runtime, and left out on this board

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
    merged: MergedSet | None,
    *,
    held: Iterable[str],
    releases: Releases,
    others: Sequence[Manifest] = (),
) -> ExtensionsReport:
    """Installed (`held` image ids), merged and wanted, put beside one another.

    `wanted` is the manifest whose set should run: the active one, or a change's during its trial. What it leaves out of
    its signed one is shown as disabled. `others` are the further runtimes on disk. `merged` is None where nobody could
    tell: then it is not judged.
    """
    held, known_merged = frozenset(held), merged is not None
    merged = merged or MergedSet({})
    views: list[ExtensionView] = []
    problems: list[Problem] = []
    listed = list(wanted.extensions) if wanted else []
    for extension in listed:
        link = wanted.link_name(extension).removesuffix(".raw") if wanted else ""
        view = _view(extension, "runtime", link, merged, held, releases)
        views.append(view)
        problems.extend(_problems_of(view, merged) if known_merged or not view.installed else [])
    base, left_out = signed(wanted) if wanted else (None, ())
    for extension in base.extensions if base else ():
        if extension.name in left_out:
            view = _view(extension, "other-runtime", "", merged, held, releases)
            views.append(replace(view, disabled=True))
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
        merged=tuple(kind for kind in types if _is_merged(link, kind, extension.image_id, merged)),
        merge_name=link,
        services=tuple(dict.fromkeys(unit for kind in types for unit in owned_services(keys.get(kind, {})))),
    )


def _is_merged(link: str, kind: Kind, image_id: str, merged: MergedSet) -> bool:
    if not link or link not in merged.names.get(kind, ()):
        return False
    # Where nobody knows which image it is, the name is believed.
    return merged.images.get(kind, {}).get(link, image_id) == image_id


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


def _problems_of(view: ExtensionView, merged: MergedSet) -> list[Problem]:
    if not view.installed:
        return [
            Problem(
                "image-missing",
                f"extension {view.name} {view.version}: its image {view.image_id} is not on the board",
                "Deploy this runtime again from the host.",
            )
        ]
    missing = [kind.value for kind in view.types if kind not in view.merged]
    if any(view.merge_name in merged.names.get(Kind(kind), ()) for kind in missing):
        return [
            Problem(
                "other-image-merged",
                f"extension {view.name} {view.version} is wanted, but another image is merged in its place",
                "Run 'avocadoctl refresh'.",
            )
        ]
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


def stray_problem(path: str, *, merges: bool) -> Problem:
    """Something that lies beside images or their links and was not put there by the agent."""
    if merges:
        return Problem(
            "stray-image",
            f"{path} was not put there by the agent: at the next boot systemd merges it, or refuses all for it",
            f"Move {path} elsewhere.",
        )
    return Problem("stray-file", f"{path} is no image of ours and is never merged", f"Move {path} elsewhere.")


def link_problem(path: str, target: str, *, present: bool) -> Problem:
    """A link of a runtime that is not as it was deployed."""
    why = (
        "was changed: the next boot merges something else" if present else "is missing: the next boot merges without it"
    )
    return Problem("link-changed", f"{path} {why}", f"Run: ln -sfn {target} {path}")


def boot_link_problem(path: str, target: str) -> Problem:
    """systemd's own folder does not lead to the active runtime."""
    return Problem(
        "boot-link-changed",
        f"{path} does not lead to the active runtime: the next boot merges something else",
        f"Move what is there elsewhere, then run: ln -sfn {target} {path}",
    )

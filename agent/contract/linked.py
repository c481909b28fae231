"""A runtime as its links tell it, where its manifest cannot be read any more.

Pure. `runtimes/<id>/<kind>/NN-<name>.raw` leads to `images/<image_id>.raw`, and that is all systemd goes by: it is
enough to stop, switch, start and guard what is merged. What only the signed manifest says, versions, hashes and when it
was built, is empty here, except where another manifest on the board lists the same image. Nothing is ever signed,
stored or deployed from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agent.contract.manifest import Extension, Manifest, RuntimeName
from agent.contract.release import Kind

UNKNOWN = "unknown"

Links = Mapping[Kind, Mapping[str, str]]  # kind -> link name without `.raw` -> image id


class LinkedRuntime(Manifest):
    """What is known of it. `built_at` is empty, and so is an extension's `sha256` where nobody knows it."""

    link_names: dict[str, str]  # image id -> link name
    newest_known: str = ""  # the newest `built_at` among the manifests that can be read; empty: there are none

    def on_board(self, target: str, arch: str) -> LinkedRuntime:
        """As the runtime of this board, which it is."""
        return self.model_copy(update={"target": target, "arch": arch})

    def link_name(self, extension: Extension) -> str:
        """The file name of its link, as it is on the disk."""
        return self.link_names[extension.image_id]


def linked_runtime(runtime_id: str, links: Links, others: Iterable[Manifest] = ()) -> LinkedRuntime:
    """The runtime with these links. `others`: manifests that may list the same images."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for kind in Kind:
        for link, image_id in links.get(kind, {}).items():
            kinds.setdefault((link, image_id), []).append(kind.value)
    others = list(others)
    known = {e.image_id: e for manifest in others for e in manifest.extensions}
    ordered = sorted(kinds, reverse=True)  # highest first, as in a manifest
    return LinkedRuntime.model_construct(
        manifest_version=1,
        id=runtime_id,
        built_at="",
        runtime=RuntimeName.model_construct(name=UNKNOWN, version=UNKNOWN),
        extensions=[_extension(link, image, kinds[link, image], known.get(image)) for link, image in ordered],
        target="",
        arch="",
        link_names={image: f"{link}.raw" for link, image in ordered},
        newest_known=max((manifest.built_at for manifest in others), default=""),
    )


def _extension(link: str, image_id: str, kinds: list[str], known: Extension | None) -> Extension:
    name = link.partition("-")[2]
    if known is not None and (known.name, sorted(known.types)) == (name, sorted(kinds)):
        return known
    return Extension.model_construct(
        name=name, version=UNKNOWN, image_id=image_id, sha256="", size_bytes=0, types=kinds
    )

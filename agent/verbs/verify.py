"""avocadoctl verify: every image and every manifest on this board, read from the disk and hashed again.

Reads only, and needs neither the bus nor the agent. What the agent checks at fetch, before a change and after a boot's
merge, this checks at once, for all runtimes: an image whose bytes are not its name's any more, one that is missing, a
link that leads elsewhere, a trust state that is damaged. The index of kernel modules, which a board makes for itself,
is an image like the others.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.linked import linked_runtime
from agent.contract.manifest import MODULE_INDEX, Extension
from agent.verbs.show import print_json, size, table

STATE = Path("/var/lib/avocado")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `problem` is empty when it is as it should be."""

    kind: str  # image | runtime | trust
    name: str
    id: str
    size_bytes: int
    problem: str


def register(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "verify",
        help="hash every image on this board again, and check runtimes and trust state",
        description="Read every image, manifest and link of this board from the disk and compare them with what was "
        "signed. Takes about a second per 200 MB.",
        epilog="examples:\n  avocadoctl verify\n  avocadoctl -H root@board -o json verify",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what was found; the status is `hash-mismatch`'s when anything is wrong."""
    found = verify(Path(os.environ.get("AVOCADO_STATE_DIR", STATE)))
    if args.output == "json":
        print_json([asdict(finding) for finding in found])
    else:
        rows = [
            (one.kind, one.name, one.id[:8], size(one.size_bytes) if one.size_bytes else "-", one.problem or "good")
            for one in found
        ]
        print(table(("WHAT", "NAME", "ID", "SIZE", "STATE"), rows))
    wrong = [finding for finding in found if finding.problem]
    if wrong:
        raise OperationError(
            ErrorCode.HASH_MISMATCH,
            f"cannot vouch for this board: {len(wrong)} of {len(found)} things are not as signed, "
            f"first {wrong[0].kind} {wrong[0].name}: {wrong[0].problem}",
            "Reboot the board, or change to that runtime: the index is made anew. If it comes back, replace the disk."
            if all(finding.name == MODULE_INDEX for finding in wrong)
            else "Run on the host: avocadoctl -H root@board deploy --again. It brings what is damaged anew; then"
            " reboot. If it comes back, replace the disk.",
        )
    return 0


def verify(state: Path) -> list[Finding]:
    """Everything, in the order of its size: trust state, runtimes, images. Raises `not-permitted`."""
    from agent.ports.files import FileStore
    from agent.ports.runtimes import FileRuntimes
    from agent.trust_state import problems

    if not os.access(state / "images", os.R_OK | os.X_OK) and (state / "images").exists():
        raise OperationError(ErrorCode.NOT_PERMITTED, f"cannot read {state / 'images'}", "Run it as root.")
    found = [Finding("trust", "metadata", "", 0, error.message) for error in problems(state / "metadata")]
    runtimes, store = FileRuntimes(state), FileStore(state)
    images = {}
    linked: dict[str, Extension] = {}
    indexes: set[str] = set()
    for runtime in runtimes.ids():
        indexes.update(filter(None, [runtimes.module_index(runtime)]))
        try:
            manifest = runtimes.manifest(runtime)
        except OperationError as error:
            found.append(Finding("runtime", runtime, runtime, 0, error.message))
            linked.update({e.image_id: e for e in linked_runtime(runtime, runtimes.links(runtime)).extensions})
            continue
        problem = ""
        images.update({extension.image_id: extension for extension in manifest.extensions})
        for extension in manifest.extensions:
            for kind in extension.types:
                link = runtimes.folder(runtime) / kind / manifest.link_name(extension)
                if not link.is_symlink() or str(link.readlink()) != f"../../../images/{extension.image_id}.raw":
                    problem = problem or f"{kind}/{link.name} does not lead to its image"
        found.append(Finding("runtime", manifest.runtime.name, runtime, 0, problem))
    for image_id, extension in sorted(images.items(), key=lambda item: item[1].name):
        path = store.image(image_id)
        problem = "it is missing" if path is None else ""
        if path is not None and not store.verify_image(extension):
            problem = "its bytes are not what was signed"
        found.append(Finding("image", f"{extension.name} {extension.version}", image_id, extension.size_bytes, problem))
    made = [(image_id, MODULE_INDEX) for image_id in sorted(indexes)]
    for image_id, name in [*((e.image_id, e.name) for e in linked.values() if e.image_id not in images), *made]:
        path = store.image(image_id)
        problem = "it is missing" if path is None else ""
        if path is not None and not store.verify_made(image_id):
            problem = "its bytes are not those of its name"
        found.append(Finding("image", name, image_id, path.stat().st_size if path else 0, problem))
    return found

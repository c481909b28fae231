"""A local runtime: a signed one with some of its extensions left out, by somebody on the board.

Pure. The signed manifest is never edited: the local one has an id of its own, and carries the whole signed one, so that
enabling needs nothing but this board. The same extensions left out give the same id. A deploy brings a signed runtime,
and with it everything that was left out.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.linked import LinkedRuntime
from agent.contract.manifest import Manifest

KEY = "local"  # the manifest's extra key: {"base": the signed manifest, "disabled": names}
_SUFFIX = "+local"


def disable(manifest: Manifest, name: str) -> Manifest:
    """The runtime without that extension. Raises `not-found`."""
    base, disabled = signed(manifest)
    _require(base, name, "disable")
    return derive(base, {*disabled, name})


def enable(manifest: Manifest, name: str) -> Manifest:
    """The runtime with that extension again. Raises `not-found`."""
    base, disabled = signed(manifest)
    _require(base, name, "enable")
    return derive(base, set(disabled) - {name})


def signed(manifest: Manifest) -> tuple[Manifest, tuple[str, ...]]:
    """The signed manifest behind one, and what is left out of it."""
    local = (manifest.model_extra or {}).get(KEY)
    if not isinstance(local, dict):
        return manifest, ()
    return Manifest.model_validate(local["base"]), tuple(local["disabled"])


def is_partial(manifest: Manifest) -> bool:
    """Whether extensions are left out of it, or may be: what only its links tell does not say."""
    return isinstance(manifest, LinkedRuntime) or bool(signed(manifest)[1])


def derive(base: Manifest, disabled: Iterable[str]) -> Manifest:
    """The signed manifest without these extensions; itself when there are none."""
    names = sorted(disabled)
    if not names:
        return base
    document = base.model_dump(mode="json", exclude_none=True)
    rest = [extension for extension in document["extensions"] if extension["name"] not in names]
    version = base.runtime.version[: 64 - len(_SUFFIX)] + _SUFFIX
    return Manifest.model_validate(
        document
        | {
            "id": str(uuid.uuid5(uuid.UUID(base.id), " ".join(["without", *names]))),
            "runtime": document["runtime"] | {"version": version},
            "extensions": rest,
            KEY: {"base": document, "disabled": names},
        }
    )


def _require(base: Manifest, name: str, verb: str) -> None:
    names = [extension.name for extension in base.extensions]
    if name not in names:
        raise OperationError(
            ErrorCode.NOT_FOUND,
            f"cannot {verb} extension {name}: runtime {base.runtime.name} {base.runtime.version} does not list it",
            f"It lists: {', '.join(names) or 'nothing'}.",
        )

"""One attack and what must come of it, and the one way every attack is judged.

Whatever an attacker does, the same holds: it is refused with its code, one exact line and a remedy; the board's state
is byte for byte what it was; and neither memory nor time went beyond a bound. A case says only what differs.
"""

from __future__ import annotations

import re
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agent.contract.errors import ErrorCode
from tests.hostile.board import Stage, image, refused

PUBLISH_AGAIN = "Publish again with avocadoctl, and look at who else can write to the repository."
# A refused answer ends within QUICK's deadline for one answer; the rest is for a machine with other work.
DEADLINE_S = 20.0
# What the decompressor may ask for (16 MiB), a segment and its payload (4 MiB each), and room for Python's own.
MEMORY_BYTES = 32 << 20

Attack = Callable[[Stage], object]


def publish_honestly(stage: Stage) -> object:
    """What the attacker starts from, unless the case says otherwise."""
    return stage.publish(image(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`by`: who of docs/threat-model.md can do it. `clause`: of the TUF specification, which refuses it.

    `knows`: the board accepted the honest publication before. `asks`: what the board wants when it is refused; before a
    transfer's size, or the image, it accepted the metadata. `message` may name facts of the stage in braces.
    """

    by: str
    attack: Attack
    code: ErrorCode
    message: str
    remedy: str = PUBLISH_AGAIN
    clause: str = ""
    knows: bool = False
    asks: Literal["manifest", "sizes", "image"] = "manifest"
    honest: Attack = publish_honestly


def judge(stage: Stage, case: Case) -> None:
    """Carry the attack out and hold it against everything a refusal must be."""
    case.honest(stage)
    if case.knows:
        stage.source(stage.server.url).manifest()
    case.attack(stage)
    source = stage.source(stage.server.url)
    ask: Callable[[], object] = source.manifest
    if case.asks != "manifest":
        wanted = source.manifest().extensions[0]
        ask = lambda: source.transfer_sizes(wanted, [])  # noqa: E731
    if case.asks == "image":
        ask()
        (stage.state / "images").mkdir(exist_ok=True)
        ask = lambda: source.fetch(wanted, [], lambda done, total: None)  # noqa: E731
    before = stage.snapshot()
    with bounded():
        error = refused(ask)
    expected = facts(stage, case.message)
    assert (error.code, same(error.message, expected), error.remedy) == (case.code, expected, case.remedy)
    assert error.message.startswith("cannot ")
    assert error.message.isprintable(), "a message is one line and moves no cursor"
    assert stage.snapshot() == before


def same(message: str, expected: str) -> str:
    """`expected` when the message is that, with any number for `{n}`; else the message, to be shown."""
    pattern = re.escape(expected).replace(re.escape("{n}"), r"\d+")
    return expected if re.fullmatch(pattern, message) else message


@contextmanager
def bounded() -> Iterator[None]:
    """What happens inside makes this process grow by less than MEMORY_BYTES, and ends before its deadline."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here
    resident = _status_bytes("VmRSS")
    tracemalloc.start()
    began = time.monotonic()
    try:
        yield
    finally:
        taken = time.monotonic() - began
        _, allocated = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    # Python counts what it allocates; the kernel counts what libraries allocate besides.
    assert allocated < MEMORY_BYTES
    assert _status_bytes("VmHWM") - resident < MEMORY_BYTES
    assert taken < DEADLINE_S


def _status_bytes(name: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def facts(stage: Stage, text: str) -> str:
    """The text with what only this stage knows in place of the braces."""

    def key_id(role: str) -> str:
        return stage.keys.signer(role).public_key.keyid

    def size(path: Path) -> int:
        return path.stat().st_size

    known: dict[str, Callable[[], object]] = {
        "url": lambda: stage.server.url,
        "release_key16": lambda: key_id("releases")[:16],
        "release_key": lambda: key_id("releases"),
        "targets_key": lambda: key_id("targets"),
        "targets_key16": lambda: key_id("targets")[:16],
        "online_key": lambda: key_id("timestamp"),
        "root_key": lambda: key_id("root"),
        "targets": lambda: stage.path_of("targets").name,
        "releases": lambda: stage.path_of("releases").name,
        "snapshot": lambda: stage.path_of("snapshot").name,
        "snapshot_bytes": lambda: size(stage.path_of("snapshot")),
        "snapshot_signed": lambda: size(stage.path_of("snapshot")) - 1,
        "timestamp_bytes": lambda: size(stage.path_of("timestamp")),
        "timestamp_end": lambda: len(stage.path_of("timestamp").read_text().rpartition("{}")[0]),
        "timestamp_column": lambda: len(stage.path_of("timestamp").read_text().rpartition("{}")[0]) + 1,
        "full": lambda: stage.target_file(".full").name,
        "full_entry": lambda: f"{stage.entry('.full')['hashes']['sha256']}.{stage.target_named('.full')}",
        "full_bytes": lambda: size(stage.target_file(".full")),
        "full_signed": lambda: stage.entry(".full")["length"],
        "manifest": lambda: f"{stage.entry('manifest.json')['hashes']['sha256']}.manifest.json",
        "manifest_bytes": lambda: size(stage.target_file(".manifest.json")),
        "manifest_signed": lambda: stage.entry("manifest.json")["length"],
    }
    return re.sub(r"\{(\w+)\}", lambda found: str(known[found[1]]()) if found[1] in known else found[0], text)

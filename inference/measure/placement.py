"""Which operators an accelerator takes and which stay on the CPU, from the interpreter's own list.

A delegate replaces each run of operators it claims by one node of its own. The list keeps the original operators first,
then one entry for each such node; walking from a node's outputs back to its inputs finds exactly what it replaced.
XNNPACK is kept away, because its nodes look the same.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference import litert

_DELEGATE = "DELEGATE"


@dataclass(frozen=True, slots=True)
class Placement:
    """Operators by name on either side, and in how many pieces the accelerator's are."""

    accelerated: Mapping[str, int]
    cpu: Mapping[str, int]
    partitions: int

    def as_dict(self) -> dict[str, Any]:
        """For model.json."""
        return {
            "accelerated": dict(sorted(self.accelerated.items())),
            "cpu": dict(sorted(self.cpu.items())),
            "partitions": self.partitions,
        }

    def summary(self) -> str:
        """For a person: `87 of 93 operators in 4 pieces; on the CPU: LOGISTIC 2, ...`."""
        taken, left = sum(self.accelerated.values()), sum(self.cpu.values())
        rest = ", ".join(f"{name} {count}" for name, count in sorted(self.cpu.items()))
        pieces = "1 piece" if self.partitions == 1 else f"{self.partitions} pieces"
        return f"{taken} of {taken + left} operators in {pieces}" + (f"; on the CPU: {rest}" if rest else "")


def place(file: Path, delegate: Any) -> Placement:
    """Prepare the model on the delegate and read what it took."""
    return from_details(_details(file, None), _details(file, delegate))


def _details(file: Path, delegate: Any | None) -> Sequence[Mapping[str, Any]]:
    runtime = importlib.import_module(f"{litert.RUNTIME}.interpreter")
    interpreter = runtime.Interpreter(
        model_path=str(file),
        experimental_delegates=[delegate] if delegate else None,
        experimental_op_resolver_type=runtime.OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
    )
    details: Sequence[Mapping[str, Any]] = interpreter._get_ops_details()
    return details


def from_details(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Placement:
    """The placement, from the operator lists without and with the delegate."""
    originals, added = after[: len(before)], after[len(before) :]
    producer = {int(tensor): index for index, entry in enumerate(originals) for tensor in entry["outputs"]}
    nodes = [entry for entry in added if entry["op_name"] == _DELEGATE]
    taken: set[int] = set()
    for node in nodes:
        taken |= _replaced(node, originals, producer)
    names = [str(entry["op_name"]) for entry in originals]
    return Placement(
        accelerated=Counter(name for index, name in enumerate(names) if index in taken),
        cpu=Counter(name for index, name in enumerate(names) if index not in taken),
        partitions=len(nodes),
    )


def _replaced(node: Mapping[str, Any], originals: Sequence[Mapping[str, Any]], producer: Mapping[int, int]) -> set[int]:
    boundary = {int(tensor) for tensor in node["inputs"]}
    waiting = [int(tensor) for tensor in node["outputs"]]
    found: set[int] = set()
    while waiting:
        tensor = waiting.pop()
        index = producer.get(tensor)
        if tensor in boundary or index is None or index in found:
            continue
        found.add(index)
        waiting += [int(source) for source in originals[index]["inputs"] if source >= 0]
    return found

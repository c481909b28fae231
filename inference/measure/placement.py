"""Which operators an accelerator takes and which stay on the CPU, from the interpreter's own list.

A delegate replaces each run of operators it claims by one node of its own. The list keeps the original operators first,
then one entry for each such node; walking from a node's outputs back to its inputs finds exactly what it replaced.
XNNPACK is kept away, because its nodes look the same.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inference import litert

_DELEGATE = "DELEGATE"


@dataclass(frozen=True, slots=True)
class Placement:
    """Operators by name on either side, and in how many pieces the accelerator's are; why, where a compiler said so."""

    accelerated: Mapping[str, int]
    cpu: Mapping[str, int]
    partitions: int
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def cpu_ops(self) -> int:
        """How many operators stay on the CPU."""
        return sum(self.cpu.values())

    def as_dict(self) -> dict[str, Any]:
        """For model.json."""
        return {
            "accelerated": dict(sorted(self.accelerated.items())),
            "cpu": dict(sorted(self.cpu.items())),
            "partitions": self.partitions,
            **({"reasons": dict(sorted(self.reasons.items()))} if self.reasons else {}),
        }

    def summary(self) -> str:
        """For a person: `87 of 93 operators in 4 pieces; on the CPU: LOGISTIC 2, ...`."""
        taken, left = sum(self.accelerated.values()), self.cpu_ops
        rest = ", ".join(f"{name} {count}" for name, count in sorted(self.cpu.items()))
        pieces = _counted(self.partitions, "piece")
        return f"{taken} of {taken + left} operators in {pieces}" + (f"; on the CPU: {rest}" if rest else "")

    def excess(self, limits: Mapping[str, int]) -> str:
        """How it breaks `max_cpu_ops` or `max_partitions`; empty when it keeps both."""
        found = {"max_cpu_ops": self.cpu_ops, "max_partitions": self.partitions}
        words = {"max_cpu_ops": "operators on the CPU", "max_partitions": "pieces on the accelerator"}
        broken = [
            f"{found[key]} {words[key]}, at most {limits[key]} are allowed"
            for key in found
            if found[key] > limits.get(key, found[key])
        ]
        return "; ".join(broken)

    def counts(self) -> str:
        """As a compiled file has them: `1 NPU operator, 0 CPU operators`."""
        return f"{_counted(self.partitions, 'NPU operator')}, {_counted(self.cpu_ops, 'CPU operator')}"


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


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

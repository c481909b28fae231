"""The arrows between modules, read from the source: nothing imports against them, and the two halves never meet.

Ranks grow outwards. A module may import what has a lower rank, and its own package. Imports inside functions and under
TYPE_CHECKING count: an arrow that is drawn late is drawn all the same.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[2]

# First match decides; a name ending in `.` is a package.
RANKS: list[tuple[str, int]] = [
    ("agent.contract.", 0),
    ("agent.contract", 0),
    ("agent.extensions", 1),
    ("agent.fitness", 1),
    ("agent.health", 1),
    ("agent.order", 1),
    ("agent.over_etc", 2),
    ("agent.signed_json", 1),
    ("agent.tried", 1),
    ("agent.plan", 3),
    ("agent.ports.protocols", 3),
    ("agent.staged", 4),
    ("agent.damage", 4),
    ("agent.delta.", 3),
    ("agent.trust_state", 4),
    ("agent.transfer", 4),
    ("agent.tuf_client", 5),
    ("agent.trust", 6),
    ("agent.change.", 4),
    ("agent.problems", 5),
    ("agent.observe", 6),
    ("agent.bystanders", 5),
    ("agent.itself", 4),
    ("agent.boot", 7),
    ("agent.requests", 7),
    ("agent.publish", 6),
    ("agent.callers", 6),
    ("agent.bus", 8),
]
ADAPTERS = "agent.ports."
# Composition roots, and adapters among themselves.
MAY_IMPORT_ADAPTERS = ("agent.daemon", "agent.cli", "agent.verbs.", "agent.host.", "agent.ports.")
# One question to the bus about whoever asks the agent, and one to polkit.
ALLOWED = {("agent.callers", "agent.ports.peer"), ("agent.callers", "agent.ports.polkit")}


@functools.cache
def modules(package: str) -> dict[str, Path]:
    found = {}
    for path in (TREE / package).rglob("*.py"):
        parts = path.relative_to(TREE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: set[str]) -> set[str]:
    """Modules of this project that a module names in any import statement."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            base = node.module or ""
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                found.add(submodule if submodule in known else base)
    return {module for module in found if module.split(".")[0] in ("agent", "inference")}


def rank(module: str) -> int | None:
    for prefix, found in RANKS:
        if module == prefix or (prefix.endswith(".") and module.startswith(prefix)):
            return found
    return None


@functools.cache
def edges(package: str) -> list[tuple[str, str]]:
    sources = modules(package)
    known = set(sources)
    return sorted((name, target) for name, path in sources.items() for target in imports(name, path, known))


def test_agent_and_inference_never_import_each_other() -> None:
    crossing = [
        edge for package in ("agent", "inference") for edge in edges(package) if not edge[1].startswith(package)
    ]
    assert crossing == []


def test_no_arrow_of_the_agent_points_outwards() -> None:
    outwards = []
    for name, target in edges("agent"):
        own, other = rank(name), rank(target)
        if own is None or target == "agent":
            continue
        same_package = name.rpartition(".")[0] == target.rpartition(".")[0] != "agent" or target.startswith(f"{name}.")
        if target.startswith(ADAPTERS) and target != "agent.ports.protocols":
            continue  # judged by the next test
        if other is None or (other >= own and not same_package and not _within(name, target)):
            outwards.append((name, target))
    assert outwards == []


def _within(name: str, target: str) -> bool:
    """Both lie in one package of the table, such as agent.change."""
    return any(
        prefix.endswith(".") and name.startswith(prefix) and (target.startswith(prefix) or f"{target}." == prefix)
        for prefix, _ in RANKS
    )


def test_only_composition_roots_import_adapters() -> None:
    found = [
        (name, target)
        for name, target in edges("agent")
        if target.startswith(ADAPTERS)
        and target != "agent.ports.protocols"
        and (name, target) not in ALLOWED
        and not name.startswith(MAY_IMPORT_ADAPTERS)
    ]
    assert found == []


def test_the_protocols_and_the_contract_import_no_library_that_talks_to_the_world() -> None:
    effects = {"os", "socket", "subprocess", "asyncio", "dbus_fast", "threading", "time"}
    for name, path in modules("agent").items():
        if rank(name) in (0, 1, 2) and name != "agent.contract.status":
            roots = {alias.split(".")[0] for alias in _all_imports(path)}
            assert not roots & effects, f"{name} imports {sorted(roots & effects)}"


@functools.cache
def _all_imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("runtime", ["ai_edge_litert", "tflite_runtime"])
def test_one_module_imports_the_runtime(runtime: str) -> None:
    importers = {
        name
        for name, path in modules("inference").items()
        if any(found.split(".")[0] == runtime for found in _all_imports(path))
        and not name.startswith(("inference.prepare", "inference.measure"))
    }
    assert importers <= {"inference.litert"}

"""`python -m tests.hostile.table > docs/attacks.md`: every attack there is a test of, as a page."""

from __future__ import annotations

from agent.contract.errors import EXIT_STATUS
from tests.hostile.cases import FAMILIES

# Version 1.0 of the specification, section by section of its client workflow and its formats.
CLAUSES = {
    "4.2": "the envelope of signatures",
    "4.3": "versions, dates and the specification's own version",
    "4.5": "delegations: keys and roles that can be counted",
    "5.3.3": "the next root: named, bounded, read",
    "5.3.4": "the next root: signed by the one before and by itself",
    "5.3.5": "the next root: exactly one version on",
    "5.3.10": "the last root has not expired",
    "5.4.1": "the timestamp: bounded",
    "5.4.2": "the timestamp: signed",
    "5.4.3.1": "the timestamp: never an older version",
    "5.4.3.2": "the timestamp: never an older snapshot",
    "5.4.4": "the timestamp has not expired",
    "5.5.1": "the snapshot: bounded by what the timestamp says",
    "5.5.2": "the snapshot: the content the timestamp says",
    "5.5.3": "the snapshot: signed",
    "5.5.4": "the snapshot: the version the timestamp says",
    "5.5.5": "the snapshot: never older targets, none left out",
    "5.5.6": "the snapshot has not expired",
    "5.6.1": "the targets: there",
    "5.6.2": "the targets: the content the snapshot says",
    "5.6.3": "the targets: signed",
    "5.6.4": "the targets: the version the snapshot says",
    "5.6.5": "the targets have not expired",
    "5.6.7": "one delegation is followed, one step, for certain names; what it leads to is held to 5.6.1 to 5.6.5",
}

HEAD = """\
# Attacks

Each line is an attack that `tests/hostile/test_attacks.py` carries out on a board's state and a repository. Whatever it
is, the board answers with the code given here, one line and a remedy; its state is byte for byte what it was; memory
and time stay below one bound for all (`tests/hostile/case.py`). Who they are is in `threat-model.md`; the clause is
that of the TUF specification, version 1.0, which refuses it. The TUF conformance suite is not in the package registry:
its cases are rebuilt here by clause.

This page is made by `python -m tests.hostile.table`.
"""


def table() -> str:
    """The page."""
    count = sum(len(cases) for cases in FAMILIES.values())
    lines = [
        HEAD,
        f"{count} attacks, {len({case.code for cases in FAMILIES.values() for case in cases.values()})} codes.",
    ]
    for family, cases in FAMILIES.items():
        lines += [
            "",
            f"## {family.capitalize()}",
            "",
            "| attack | by | code | status | clause |",
            "|---|---|---|---|---|",
        ]
        for name, case in cases.items():
            lines.append(f"| {name} | {case.by} | `{case.code}` | {EXIT_STATUS[case.code]} | {case.clause} |")
    lines += ["", "## By clause", "", "| clause | what it asks | attacks |", "|---|---|---|"]
    for clause, says in CLAUSES.items():
        names = [name for cases in FAMILIES.values() for name, case in cases.items() if case.clause == clause]
        lines.append(f"| {clause} | {says} | {'; '.join(names)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")

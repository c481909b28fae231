"""The order in which units are started, and which units go down with others: systemd's own, since it would do so too.

Pure. Stopping happens in the reverse order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Relations:
    """What one unit has to do with others.

    `after`: it is started after these. `stops`: its stop stops these too (RequiredBy=, BoundBy=, ConsistsOf=).
    """

    after: frozenset[str] = frozenset()
    stops: frozenset[str] = frozenset()


def in_start_order(names: Iterable[str], relations: Mapping[str, Relations], *, first: str = "") -> list[str]:
    """The same names, each behind those of them that it is started after; otherwise `first`, then as they came.

    A cycle is cut where it was entered: systemd cuts it too, and says so.
    """
    names = sorted(dict.fromkeys(names), key=lambda name: name != first)
    ordered: dict[str, None] = {}
    entered: set[str] = set()

    def place(name: str) -> None:
        if name in entered:
            return
        entered.add(name)
        after = relations.get(name, Relations()).after
        for earlier in names:
            if earlier in after:
                place(earlier)
        ordered[name] = None

    for name in names:
        place(name)
    return list(ordered)

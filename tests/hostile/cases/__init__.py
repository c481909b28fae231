"""Every attack by name, family by family; tests/hostile/test_attacks.py carries each of them out."""

from __future__ import annotations

from collections.abc import Mapping

from tests.hostile.case import Case
from tests.hostile.cases import (
    delegations,
    documents,
    entries,
    freshness,
    mixtures,
    names,
    servers,
    signatures,
    transfers,
)

FAMILIES: Mapping[str, Mapping[str, Case]] = {
    "signatures": signatures.CASES,
    "delegations": delegations.CASES,
    "freshness": freshness.CASES,
    "mixtures": mixtures.CASES,
    "documents": documents.CASES,
    "names": names.CASES,
    "entries": entries.CASES,
    "servers": servers.CASES,
    "transfers": transfers.CASES,
}

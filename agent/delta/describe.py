"""Reads a delta without applying it: its header, and how much each kind of operation makes and carries."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent.delta.format import HEADER_BYTES, DeltaInfo, OpKind, next_cursor, parse_header, read_op
from agent.delta.stream import Reader, file_chunks


@dataclass(slots=True)
class Share:
    """What one kind of operation contributes. `moved_bytes` are its payloads."""

    operations: int = 0
    result_bytes: int = 0
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Description:
    """A delta's header and its operations by kind."""

    info: DeltaInfo
    delta_size_bytes: int
    shares: dict[str, Share]

    def as_dict(self) -> dict[str, Any]:
        """As JSON prints it."""
        return {**asdict(self.info), "delta_size_bytes": self.delta_size_bytes, "operations": self._operations()}

    def _operations(self) -> dict[str, Any]:
        return {name: asdict(share) for name, share in self.shares.items()}


def read_info(path: Path) -> DeltaInfo:
    """The header of a delta file. Raises `delta-invalid`."""
    return parse_header(Reader(file_chunks(path)).take(HEADER_BYTES))


def describe(path: Path) -> Description:
    """Walk a delta's operations, to its end, without decompressing one. Raises `delta-invalid`."""
    reader = Reader(file_chunks(path))
    info = parse_header(reader.take(HEADER_BYTES))
    shares = {kind.name.lower(): Share() for kind in OpKind if kind is not OpKind.END}
    cursor = produced = 0
    while (op := read_op(reader.take, info, cursor, produced)).kind is not OpKind.END:
        reader.take(op.payload_bytes)
        share = shares[op.kind.name.lower()]
        share.operations += 1
        share.result_bytes += op.length
        share.moved_bytes += op.payload_bytes
        cursor = next_cursor(op, cursor)
        produced += op.length
    reader.finish()
    return Description(info, reader.offset, shares)

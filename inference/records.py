"""The records that service, supervisor and workers exchange: fixed structs for frames, JSON for everything rare.

Each begins with its kind. All stay below PIPE_BUF, so a write to a pipe is whole or not at all; the pipes are in packet
mode and the socket is SEQPACKET, so one read is one record. A worker is a process of our own that runs a vendor's
library: the supervisor checks the length and the generation of what it reads and believes nothing else blindly.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from inference.policy import Backend, Reason

POSE_BYTES = 17 * 3 * 4
RECORD_LIMIT = 4096
"""What a pipe carries whole."""
NOTE_LIMIT = 1 << 17
"""What a socket carries whole: below the default send buffer."""


class Kind(IntEnum):
    """What a record is."""

    FRAME = 1
    GOLDEN = 2
    POSE = 3
    NOTE = 4


_TOKEN = struct.Struct("<IIQI")
_POSE = struct.Struct(f"<IIQfQ{POSE_BYTES}s")
_ASK = struct.Struct("<IIQ")
_ANSWER = struct.Struct(f"<IBBBxQ{POSE_BYTES}s")
_KIND = struct.Struct("<I")
_BACKENDS = tuple(Backend)
_REASONS = tuple(Reason)


@dataclass(frozen=True, slots=True)
class Token:
    """Supervisor to worker: compute this slot, or the golden frame."""

    kind: Kind
    generation: int
    sequence: int
    slot: int

    def pack(self) -> bytes:
        """The bytes for the pipe."""
        return _TOKEN.pack(self.kind, self.generation, self.sequence, self.slot)

    @classmethod
    def unpack(cls, raw: bytes) -> Token:
        """The inverse of `pack`."""
        kind, generation, sequence, slot = _TOKEN.unpack(raw)
        return cls(Kind(kind), generation, sequence, slot)


@dataclass(frozen=True, slots=True)
class WorkerPose:
    """Worker to supervisor: a pose as bytes. `oks` means something for the golden frame only."""

    generation: int
    sequence: int
    oks: float
    busy_ns: int
    pose: bytes

    def pack(self) -> bytes:
        """The bytes for the pipe."""
        return _POSE.pack(Kind.POSE, self.generation, self.sequence, self.oks, self.busy_ns, self.pose)

    @classmethod
    def unpack(cls, raw: bytes) -> WorkerPose:
        """The inverse of `pack`."""
        _, generation, sequence, oks, busy_ns, pose = _POSE.unpack(raw)
        return cls(generation, sequence, oks, busy_ns, pose)


@dataclass(frozen=True, slots=True)
class Ask:
    """Service to supervisor: answer the frame in this slot."""

    slot: int
    sequence: int

    def pack(self) -> bytes:
        """The bytes for the socket."""
        return _ASK.pack(Kind.FRAME, self.slot, self.sequence)

    @classmethod
    def unpack(cls, raw: bytes) -> Ask:
        """The inverse of `pack`."""
        _, slot, sequence = _ASK.unpack(raw)
        return cls(slot, sequence)


@dataclass(frozen=True, slots=True)
class Reply:
    """Supervisor to service: the pose, who made it and why that backend."""

    sequence: int
    backend: Backend
    reason: Reason
    fell_back: bool
    pose: bytes

    def pack(self) -> bytes:
        """The bytes for the socket."""
        backend, reason = _BACKENDS.index(self.backend), _REASONS.index(self.reason)
        return _ANSWER.pack(Kind.POSE, backend, reason, self.fell_back, self.sequence, self.pose)

    @classmethod
    def unpack(cls, raw: bytes) -> Reply:
        """The inverse of `pack`."""
        _, backend, reason, fell_back, sequence, pose = _ANSWER.unpack(raw)
        return cls(sequence, _BACKENDS[backend], _REASONS[reason], bool(fell_back), pose)


def kind_of(raw: bytes) -> Kind:
    """The kind of a record."""
    return Kind(_KIND.unpack_from(raw)[0])


def pack_note(fields: Mapping[str, Any]) -> bytes:
    """A rare message, as JSON."""
    return _KIND.pack(Kind.NOTE) + json.dumps(fields).encode()


def unpack_note(raw: bytes) -> dict[str, Any]:
    """The inverse of `pack_note`."""
    fields = json.loads(raw[_KIND.size :])
    if not isinstance(fields, dict):
        raise TypeError("a note is a JSON object")
    return fields

"""Extensions as the board sees them: installed, merged, wanted, and the difference, with every problem named.

Pure: it takes what the store, systemd and the active runtime say and returns values. It promises that nothing is
adopted by half: an image that systemd merged and the runtime does not list is a problem with a remedy, never an
extension of ours. Compatibility follows systemd's `extension_release_validate()` (src/shared/extension-util.c, v257),
because systemd ignores an incompatible image with exit status 0: the agent has to know before.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from agent.contract.errors import ErrorCode, OperationError
from agent.contract.manifest import Extension, Manifest

MAX_RELEASE_BYTES = 64 * 1024
ARCHITECTURES: Mapping[str, str] = {"x86_64": "x86-64", "aarch64": "arm64"}  # ours -> systemd's


class Kind(StrEnum):
    """What an extension merges over."""

    SYSEXT = "sysext"  # /usr and /opt
    CONFEXT = "confext"  # /etc


@dataclass(frozen=True, slots=True)
class MergedSet:
    """What is merged now: per kind, the merged link names without `.raw`, lowest first (`["95-pose-model", ...]`)."""

    names: Mapping[Kind, tuple[str, ...]]
    since: Mapping[Kind, str] = field(default_factory=dict)

"""Which faults the simulated NPU can be given, and how they reach it: one word in its control file.

The simulated NPU reads the file at every invoke. It is replaced by a rename, so that no invoke ever sees half a word.
A profile whose delegate has no `control` option is a real NPU, and nothing is injected into one.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from inference.errors import InferenceError

if TYPE_CHECKING:
    from inference.accelerator import Accelerator

MODES = ("ok", "hang", "spin", "slow", "error", "wrong", "crash", "abort")
_SLOW_MS = 100
_SLOW = re.compile(r"slow:[1-9][0-9]{0,4}")


def control_file(accelerator: Accelerator) -> Path | None:
    """The file of a simulated NPU, None for a real one."""
    control = accelerator.delegate.options.get("control") if accelerator.delegate else None
    return Path(control) if control else None


def write_fault(control: Path | None, mode: str) -> None:
    """Give the fault to the simulated NPU; InferenceError when there is none or it does not know this fault."""
    if control is None:
        raise InferenceError(
            f"cannot inject {mode}: this board's accelerator profile is not a simulated NPU",
            "try it on the virtual board (make board)",
        )
    if mode not in MODES and not _SLOW.fullmatch(mode):
        raise InferenceError(f"cannot inject {mode}: no such fault", f"use one of: {', '.join(MODES)}")
    word = f"slow:{_SLOW_MS}" if mode == "slow" else mode
    fresh = control.with_name(control.name + ".new")
    try:
        fresh.write_text(word + "\n", encoding="ascii")
        fresh.replace(control)
    except OSError as error:
        raise InferenceError(f"cannot inject {mode}: {control}: {error.strerror}") from error

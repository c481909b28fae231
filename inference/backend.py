"""What a worker needs of an inference runtime. LiteRT is the only one today; another would be one more file like it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Backend(Protocol):
    """One model, prepared for one accelerator, in this process."""

    def infer(self, frame: npt.NDArray[np.uint8]) -> Mapping[str, npt.NDArray[Any]]:
        """Outputs of a frame uint8[1, size, size, 3] by signature name, as float32; may never return."""
        ...

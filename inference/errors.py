"""The one error of the pose service and its workers: what cannot be done, and what to do about it.

Messages begin with "cannot" and name the object; the remedy is an imperative sentence or empty. It crosses process
borders as a JSON object with these fields.
"""

from __future__ import annotations


class InferenceError(Exception):
    """An operation on a model, an accelerator or a worker that was refused or failed."""

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

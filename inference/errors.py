"""The one error of the pose service and its tools: what cannot be done, and what to do about it.

Messages begin with "cannot", name the object, then the cause. The remedy is an imperative sentence, or absent.
"""

from __future__ import annotations


class InferenceError(Exception):
    """A failure that a person can act on; everything else is a programming mistake and stays an ordinary exception."""

    def __init__(self, message: str, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

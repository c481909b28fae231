"""Closed schemas: a key nobody knows is refused, and the message names the nearest known one.

A misspelt key that is silently ignored costs an afternoon on a board. Every document a person writes by hand is
validated through `Closed`.
"""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator


class Closed(BaseModel):
    """A mapping with known keys only; scalars are not converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for key in data:
            if key not in cls.model_fields:
                close = difflib.get_close_matches(str(key), cls.model_fields, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(cls.model_fields)}"
                raise ValueError(f"unknown key {key!r}; {hint}")
        return data


def first_problem(cause: Exception) -> str:
    """One line: where in the document, and what is wrong there."""
    if isinstance(cause, ValidationError):
        first = cause.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        said = first["msg"].removeprefix("Value error, ")
        return f"{where}: {said}" if where else said
    return str(cause).splitlines()[0] if str(cause) else type(cause).__name__

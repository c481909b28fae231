"""Progress bars for steps that take more than a second; on a terminal only, so that a log stays readable."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def bar(items: Iterable[T], label: str, *, total: int | None = None, unit: str = "picture") -> Iterable[T]:
    """The same items, counted on standard error while they are taken."""
    shown: Iterable[T] = tqdm(items, label, total, unit=unit, disable=None, leave=False)
    return shown

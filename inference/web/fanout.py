"""One publisher, many readers of different speed, and nobody waits for anybody.

Each reader has a short queue of its own. A reader that does not keep up loses the oldest entries and is told how many;
the publisher never blocks and never holds more than `readers * depth` entries.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class TooManyReadersError(Exception):
    """Every place is taken."""


class Reader(Generic[T]):
    """One reader's queue."""

    def __init__(self, depth: int) -> None:
        self._entries: deque[T] = deque(maxlen=depth)
        self._fresh = asyncio.Event()
        self._closed = False
        self.skipped = 0

    async def next(self) -> T | None:
        """The oldest entry not read yet; None when the publisher has closed."""
        while not self._entries:
            if self._closed:
                return None
            self._fresh.clear()
            await self._fresh.wait()
        return self._entries.popleft()

    def put(self, entry: T) -> None:
        """Add an entry, pushing out the oldest when the queue is full."""
        if len(self._entries) == self._entries.maxlen:
            self.skipped += 1
        self._entries.append(entry)
        self._fresh.set()

    def close(self) -> None:
        """Let `next` return None once the queue is empty."""
        self._closed = True
        self._fresh.set()


class Fanout(Generic[T]):
    """The publisher's side."""

    def __init__(self, depth: int, places: int) -> None:
        self._depth = depth
        self._places = places
        self._readers: set[Reader[T]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._readers)

    @contextmanager
    def reader(self) -> Iterator[Reader[T]]:
        """A place among the readers, for the time of the context; TooManyReadersError when none is free."""
        if len(self._readers) >= self._places:
            raise TooManyReadersError
        reader: Reader[T] = Reader(self._depth)
        if self._closed:
            reader.close()
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)

    def publish(self, entry: T) -> None:
        """Give the entry to every reader there is now."""
        for reader in self._readers:
            reader.put(entry)

    def close(self) -> None:
        """End every reader, and those that come later at once."""
        self._closed = True
        for reader in self._readers:
            reader.close()

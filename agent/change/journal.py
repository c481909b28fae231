"""The journal: one file per change, `changes/<n>.json`, each write durable.

Numbers only grow. Files that are not `<n>.json` are not ours and are left alone. A record that cannot be read is said
so by name; it never hides the others from `history`. The newest KEPT records stay, and of the older ones whatever still
says something: a change that has not ended, and the newest that was committed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from agent.change.record import ChangeRecord, Outcome, parse_record
from agent.contract.errors import ErrorCode, OperationError

MAX_RECORD_BYTES = 4 * 1024 * 1024
KEPT = 200
_LOG = logging.getLogger("avocado.change")
_NAME = re.compile(r"([1-9][0-9]{0,8})\.json")


@dataclass(frozen=True, slots=True)
class Journal:
    """The records in one folder. `write_durably` replaces a file's content or leaves the old one, folder and all."""

    folder: Path
    write_durably: Callable[[Path, bytes], None]

    def next_number(self) -> int:
        """One more than any number ever used here."""
        return max(self.numbers(), default=0) + 1

    def numbers(self) -> list[int]:
        """Every change on record, oldest first. Raises `disk-failed` where nobody can tell."""
        try:
            names = [_NAME.fullmatch(path.name) for path in self.folder.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as cause:
            # Not as if there were none: the next change would take a number that is taken.
            raise OperationError(
                ErrorCode.DISK_FAILED,
                f"cannot read {self.folder}: {cause.strerror or cause}",
                "Check the disk: journalctl -k -b -p warning",
            ) from cause
        return sorted(int(name.group(1)) for name in names if name)

    def save(self, record: ChangeRecord) -> None:
        """The record is on disk when this returns."""
        self.write_durably(self._path(record.number), record.as_bytes())

    def load(self, number: int) -> ChangeRecord:
        """One record. Raises `not-found`, `newer-schema`, or `internal` when the file is damaged."""
        path = self._path(number)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_RECORD_BYTES)
        except FileNotFoundError as cause:
            raise OperationError(
                ErrorCode.NOT_FOUND,
                f"cannot find change {number}",
                "Run 'avocadoctl history' to see which changes are on record.",
            ) from cause
        except OSError as cause:
            raise OperationError(ErrorCode.INTERNAL, f"cannot read {path}: {cause.strerror}") from cause
        try:
            return replace(parse_record(data), number=number)
        except OperationError as cause:
            remedy = cause.remedy or f"Move {path} out of the folder."
            raise OperationError(cause.code, f"{cause.message} of change {number}", remedy) from cause

    def last_change(self) -> tuple[ChangeRecord | None, list[OperationError]]:
        """The newest record that is more than a plan, and what could not be read before it was found."""
        unreadable: list[OperationError] = []
        for number in reversed(self.numbers()):
            try:
                record = self.load(number)
            except OperationError as error:
                unreadable.append(error)
                continue
            if record.outcome is not Outcome.PLANNED:
                return record, unreadable
        return None, unreadable

    def newest(self) -> ChangeRecord | None:
        """The change that may still be running. Raises as `load` does."""
        numbers = self.numbers()
        return self.load(numbers[-1]) if numbers else None

    def changes(self) -> Iterator[ChangeRecord]:
        """Every record that is more than a plan, newest first, read as they are asked for; the unreadable left out."""
        for number in reversed(self.numbers()):
            try:
                record = self.load(number)
            except OperationError as error:
                _LOG.warning("%s", error.message)
                continue
            if record.outcome is not Outcome.PLANNED:
                yield record

    def prune(self) -> None:
        """Old records that say nothing any more are gone. One that cannot be read or removed stays."""
        try:
            old = self.numbers()[:-KEPT]
        except OperationError as cause:
            _LOG.warning("%s", cause.message)
            return
        for number in old:
            try:
                record = self.load(number)
                if record.outcome is Outcome.RUNNING or (record.committed and self._left_by() == number):
                    continue
                self._path(number).unlink()
            except (OperationError, OSError) as cause:
                _LOG.warning("cannot prune the record of change %d: %s", number, cause)

    def _left_by(self) -> int:
        """The newest change that was committed: what the board was left as."""
        return next((record.number for record in self.changes() if record.committed), 0)

    def history(self, limit: int = 0) -> tuple[list[ChangeRecord], list[OperationError]]:
        """The newest records, newest first (limit 0: all), and what could not be read."""
        records: list[ChangeRecord] = []
        unreadable: list[OperationError] = []
        for number in reversed(self.numbers()):
            if limit and len(records) >= limit:
                break
            try:
                records.append(self.load(number))
            except OperationError as error:
                unreadable.append(error)
        return records, unreadable

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.json"

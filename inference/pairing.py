"""Whether a model file and a board belong together: pure rules over versions.

What a file was made for stands in its record in model.json; what a board has is found where the accelerator profile
says. The profile also says how near the two must be, because that is a vendor's promise and not ours. Only what is
known on both sides is judged: a profile that cannot say which delegate it has refuses nothing for its sake.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from inference.errors import InferenceError

_NUMBER = re.compile(r"\d+(?:\.\d+)*")


class Rule(StrEnum):
    """How near the board's version must be to the one the file was made for."""

    SAME = "same"
    MAJOR = "major"
    AT_LEAST = "at-least"


ALWAYS: Mapping[str, Rule] = {"schema": Rule.AT_LEAST, "runtime": Rule.AT_LEAST}
"""What every accelerator's file is held to, the CPU's too."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What does not fit, and both versions of it."""

    what: str
    rule: Rule
    made_for: str
    found: str

    def error(self, model: str, accelerator: str) -> InferenceError:
        """As a refusal to run that model there."""
        if self.rule is Rule.AT_LEAST:
            cause = f"its file needs {self.what} {self.made_for} or later, and this board has {self.found}"
        else:
            cause = f"its file was made for {self.what} {self.made_for}, and this board has {self.found}"
        return InferenceError(
            f"cannot run {model} on {accelerator}: {cause}",
            f"prepare the model for this board's {self.what}, or update the board",
        )


def mismatch(made_for: Mapping[str, str], found: Mapping[str, str], rules: Mapping[str, Rule]) -> Mismatch | None:
    """The first version of the file's record that the board's breaks, in the order of the rules."""
    for what, rule in rules.items():
        theirs, ours = made_for.get(what, ""), found.get(what, "")
        if theirs and ours and not _fits(theirs, ours, rule):
            return Mismatch(what, rule, theirs, ours)
    return None


def _fits(made_for: str, found: str, rule: Rule) -> bool:
    theirs, ours = _numbers(made_for), _numbers(found)
    if rule is Rule.SAME or not theirs or not ours:
        return made_for == found
    if rule is Rule.MAJOR:
        return theirs[0] == ours[0]
    # 2.2 is as good as 2.2.0.
    width = max(len(theirs), len(ours))
    return ours + (0,) * (width - len(ours)) >= theirs + (0,) * (width - len(theirs))


def _numbers(version: str) -> tuple[int, ...]:
    """The first dotted number in a version: (6, 4, 11) of `6.4.11.p2`."""
    found = _NUMBER.search(version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()

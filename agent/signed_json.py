"""One strict reading of signed JSON, before anything else parses it.

The bytes that were signed and the values that are used must not come from two readings. Refused, with the place in the
document: repeated keys, fractions, booleans where no boolean belongs, numbers no other reader holds exactly, text that
is not UTF-8 or is an unpaired surrogate, null, deep nesting, bytes before or after. Of TUF metadata two more things are
checked, which its library does not: a target's name is one that cannot become a path or a terminal's escape, and a role
does not list one key under two ids, a delegated one neither. Raises `metadata-malformed`, `duplicate-member`,
`name-refused`, `key-counted-twice`, or `metadata-mixed` for another role's document.
"""

from __future__ import annotations

import json
import re
from typing import Any

from agent.contract.delta import RELEASES
from agent.contract.errors import ErrorCode, OperationError

MAX_DEPTH = 16
# Objects, lists and strings: each costs many times the bytes that say it. Four thousand transfers have fewer.
MAX_PARTS = 200_000
MAX_NUMBER = (1 << 53) - 1
_BOOLEAN_KEYS = frozenset({"consistent_snapshot", "terminating"})
_TARGET_NAME = re.compile(r"\A[a-z0-9][a-z0-9.-]{0,127}\Z")
# Brackets, and strings to skip them in. Possessive: with backtracking, a long string costs a hundred times its size.
_STRUCTURE = re.compile(r'[\[\]{}]|"(?:[^"\\]++|\\.)*+"?')
# A number this long is refused before it is converted, which takes time quadratic in its length.
_MAX_DIGITS = 17


def read_strictly(data: bytes, name: str, *, booleans: frozenset[str] | None = _BOOLEAN_KEYS) -> Any:
    """The document. `booleans`: the keys whose value may be true or false; None: any key."""
    depth = 0
    deepest = 0
    try:
        text = data.decode("utf-8")
        for number, match in enumerate(_STRUCTURE.finditer(text)):
            if number > MAX_PARTS:
                raise _invalid(name, f"it has more than {MAX_PARTS} parts")
            symbol = match[0]
            if symbol in "[{":
                depth += 1
                deepest = max(deepest, depth)
            elif symbol in "]}":
                depth -= 1
        if deepest > MAX_DEPTH:
            raise _invalid(name, f"it is nested {deepest} deep, at most {MAX_DEPTH} is read")
        document = json.loads(
            text,
            object_pairs_hook=_no_repeats,
            parse_float=_no_fraction,
            parse_int=_bounded,
            parse_constant=_no_fraction,
        )
    except ValueError as cause:
        first = str(cause).partition("\n")[0]
        code = ErrorCode.DUPLICATE_MEMBER if isinstance(cause, _TwiceError) else ErrorCode.METADATA_MALFORMED
        raise _refused(name, first or "it is not JSON", code) from cause
    _walk(document, name, "", booleans)
    return document


def check_metadata(data: bytes, name: str) -> dict[str, Any]:
    """TUF metadata that was read strictly and whose names and keys are what this agent allows.

    `name` is the file's, `timestamp.json` or `3.root.json`: it says which role's document this has to be. A delegated
    role's is of the type `targets`.
    """
    document = read_strictly(data, name)
    signed = document.get("signed") if isinstance(document, dict) else None
    if (
        not isinstance(document, dict)
        or not isinstance(signed, dict)
        or not isinstance(document.get("signatures"), list)
    ):
        raise _invalid(name, "it is not signed metadata")
    role = role_of(name)
    if signed.get("_type") != ("targets" if role == RELEASES else role):
        raise _refused(name, f"it is not a {role} but a {_short(signed.get('_type'))}", ErrorCode.METADATA_MIXED)
    targets = signed.get("targets")
    for target in targets if isinstance(targets, dict) else ():
        if not _TARGET_NAME.match(target) or ".." in target:
            why = f"signed.targets: {_short(target)} is not a name this agent knows"
            raise _refused(name, why, ErrorCode.NAME_REFUSED)
    delegations = signed.get("delegations")
    for where, trusted in (("signed", signed), ("signed.delegations", delegations)):
        if isinstance(trusted, dict) and isinstance(trusted.get("keys"), dict):
            _check_distinct_keys(trusted, where, name)
    return document


def role_of(name: str) -> str:
    """Whose document a file holds: `3.root.json` the root's."""
    return name.removesuffix(".json").rpartition(".")[2]


def _check_distinct_keys(trusted: dict[str, Any], place: str, name: str) -> None:
    """A threshold counts keys, and a key is its material, however it is spelt and whatever id it has."""
    roles = trusted.get("roles")
    if isinstance(roles, list):  # those of a delegation; the root's are an object
        roles = {str(number): role for number, role in enumerate(roles)}
    for role_name, role in roles.items() if isinstance(roles, dict) else ():
        where = f"{place}.roles.{_plain(role_name[:64])}"
        ids = role.get("keyids") if isinstance(role, dict) else None
        if not isinstance(ids, list):
            raise _invalid(name, f"{where} lists no keys")
        seen: dict[bytes, str] = {}
        for key_id in ids:
            material = _material(trusted["keys"], key_id)
            if material is None:
                raise _invalid(name, f"{where}: key {_short(key_id)} is not there")
            if material in seen:
                both = f"{_short(seen[material][:16])} and {_short(key_id[:16])}"
                raise _refused(name, f"{where}: {both} are one key, which counts once", ErrorCode.KEY_COUNTED_TWICE)
            seen[material] = key_id


def _material(keys: dict[str, Any], key_id: object) -> bytes | None:
    """The key behind an id, in one spelling; None for what is no key: nobody has signed this yet."""
    key = keys.get(key_id) if isinstance(key_id, str) else None
    value = key.get("keyval") if isinstance(key, dict) else None
    public = value.get("public") if isinstance(value, dict) else None
    if not isinstance(public, str):
        return None
    try:
        return bytes.fromhex(public)
    except ValueError:
        return "".join(public.split()).encode()


class _TwiceError(ValueError):
    """One member stands twice in an object."""


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _TwiceError(f"key {_short(key)} stands twice")
        found[key] = value
    return found


def _no_fraction(text: str) -> Any:
    raise ValueError(f"{text[:24]} is not a whole number")


def _bounded(text: str) -> int:
    if len(text) > _MAX_DIGITS or abs(int(text)) > MAX_NUMBER:
        raise ValueError(f"a number of {len(text)} digits is too large")
    return int(text)


def _walk(value: Any, name: str, where: str, booleans: frozenset[str] | None) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            place = f"{where}.{key[:64]}" if where else key[:64]
            _check_text(key, name, where or "document")
            if isinstance(item, bool) and booleans is not None and key not in booleans:
                raise _invalid(name, f"{_plain(place)} is true or false where neither belongs")
            _walk(item, name, place, booleans)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, bool) and booleans is not None:
                raise _invalid(name, f"{_plain(where)}[{index}] is true or false where neither belongs")
            _walk(item, name, f"{where}[{index}]", booleans)
    elif isinstance(value, str):
        _check_text(value, name, where)
    elif value is None and booleans is not None:
        # python-tuf reads it as the value it would have chosen: null is another spelling of version 1.
        raise _invalid(name, f"{_plain(where)} is null")


def _check_text(text: str, name: str, where: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _invalid(name, f"{_plain(where)} holds half a character")


def _plain(text: str) -> str:
    return text if text.isascii() and text.isprintable() else ascii(text)


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 66 else text[:64] + ".."


def _invalid(name: str, why: str) -> OperationError:
    return _refused(name, why, ErrorCode.METADATA_MALFORMED)


def _refused(name: str, why: str, code: ErrorCode) -> OperationError:
    return OperationError(
        code,
        f"cannot trust {name}: {why}",
        "Publish again with avocadoctl, and look at who else can write to the repository.",
    )

"""Which operators a .tflite file needs, read from its tables without running anything.

A runtime that meets an operator it lacks fails late and in odd words, and one file of this kind makes it crash. So the
worker asks here first: the message names the operator, its place in the graph and what to do. The file is foreign
input: every offset is checked against its bounds, names are printed escaped, and a damaged table is a refusal.
Follows TensorFlow Lite's schema.fbs (Model, OperatorCode, SubGraph, Operator).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from inference.errors import InferenceError

_ITEMS_LIMIT = 1 << 20
_CUSTOM = 32
# Codes that stand for something else: a graph already given to a delegate, and "see the wider field".
_NO_OPERATORS = frozenset({51, 127})
# What the runtime registers beyond the builtin operators; each crashes or fails without options.
_CUSTOM_IN_RUNTIME = frozenset({"TFLite_Detection_PostProcess", "AudioSpectrogram", "Mfcc", "NumericVerify"})
_COMPILED_FOR = {
    "ethos-u": "an Arm Ethos-U (by Vela)",
    "edgetpu-custom-op": "a Coral Edge TPU",
    "NeutronGraph": "an NXP Neutron",
}


@dataclass(frozen=True, slots=True)
class Operator:
    """One node of the first graph. `name` is that of a custom operator, empty for a builtin one."""

    index: int
    code: int
    name: str
    has_options: bool


def check_operators(file: Path, custom: Collection[str], runtime: str) -> None:
    """InferenceError when the file needs a custom operator that neither the runtime nor the delegate (`custom`) has.

    A builtin operator that is newer than the runtime is left to the runtime, which names it and knows itself best.
    """
    for operator in operators(file):
        lacking = _lacking(operator, custom, runtime)
        if lacking is not None:
            what, remedy = lacking
            raise InferenceError(f"cannot load {file.name}: operator {operator.index} {what}", remedy)


def operators(file: Path) -> list[Operator]:
    """Every operator of the first graph; InferenceError when the file is no model."""
    raw = file.read_bytes()
    try:
        found = list(_operators(_Bytes(raw)))
    except (struct.error, ValueError) as error:
        raise _damaged(file, f"its tables are damaged ({error})") from error
    if raw[4:8] != b"TFL3" or not found:
        raise _damaged(file, "it is no TensorFlow Lite model")
    return found


def _lacking(operator: Operator, custom: Collection[str], runtime: str) -> tuple[str, str] | None:
    shown = ascii(operator.name)
    if operator.code != _CUSTOM:
        if operator.code in _NO_OPERATORS or operator.code < 0:
            return f"has the code {operator.code}, which is no operator's", "convert the model again"
        return None
    if operator.name in custom:
        return None
    if operator.name in _CUSTOM_IN_RUNTIME:
        return None if operator.has_options else (f"({shown}) has no options", "convert the model again")
    if operator.name in _COMPILED_FOR:
        return (
            f"is {shown}: this file is compiled for {_COMPILED_FOR[operator.name]}",
            "name the original file for this backend in model.json",
        )
    if operator.name.startswith("Flex"):
        return (f"is {shown}, which needs TensorFlow itself", "convert the model without select TensorFlow operators")
    return (
        f"is {shown}, which {runtime} lacks",
        "prepare the model without it, or name it under delegate.operators where the delegate has it",
    )


def _damaged(file: Path, cause: str) -> InferenceError:
    return InferenceError(f"cannot load {file.name}: {cause}", "prepare the model again")


class _Bytes:
    """A flatbuffer's tables, with every offset checked."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def number(self, form: str, at: int) -> int:
        if at < 0:
            raise ValueError("an offset points before the file")
        return int(struct.unpack_from(form, self._raw, at)[0])

    def root(self) -> int:
        return self.number("<I", 0)

    def field(self, table: int, number: int) -> int | None:
        """Where a field of a table lies; None when it has its default."""
        vtable = table - self.number("<i", table)
        place = 4 + 2 * number
        if place >= self.number("<H", vtable):
            return None
        offset = self.number("<H", vtable + place)
        return table + offset if offset else None

    def tables(self, table: int, number: int) -> Iterator[int]:
        """The tables of a vector."""
        at = self.field(table, number)
        if at is None:
            return
        vector = at + self.number("<I", at)
        count = self.number("<I", vector)
        if count > _ITEMS_LIMIT:
            raise ValueError("a vector is longer than any model's")
        for index in range(count):
            place = vector + 4 + 4 * index
            yield place + self.number("<I", place)

    def text(self, table: int, number: int) -> str:
        at = self.field(table, number)
        if at is None:
            return ""
        start = at + self.number("<I", at)
        length = self.number("<I", start)
        return self._raw[start + 4 : start + 4 + min(length, 200)].decode(errors="replace")


def _operators(raw: _Bytes) -> Iterator[Operator]:
    model = raw.root()
    codes = [_code(raw, table) for table in raw.tables(model, 1)]
    graph = next(raw.tables(model, 2), None)
    if graph is None:
        return
    for index, table in enumerate(raw.tables(graph, 3)):
        at = raw.field(table, 0)
        number = raw.number("<I", at) if at is not None else 0
        if number >= len(codes):
            raise ValueError(f"operator {index} has no code")
        code, name = codes[number]
        yield Operator(index, code, name, raw.field(table, 5) is not None)


def _code(raw: _Bytes, table: int) -> tuple[int, str]:
    """The builtin code and, of a custom operator, the name. Files of old converters have the narrow field only."""
    narrow, wide = raw.field(table, 0), raw.field(table, 3)
    code = max(raw.number("<b", narrow) if narrow is not None else 0, raw.number("<i", wide) if wide is not None else 0)
    return code, raw.text(table, 1) if code == _CUSTOM else ""

"""MoveNet not cut: its own decode as operators behind the INT8 heads, the way a converter leaves it.

Nobody runs this file. It exists to be placed, so that what the cut saves is seen on the same weights, not believed.
Still it computes: every tensor has the range that its values had on the calibration pictures, the picture is cast
first, integers stay integers, and the square root and the division are float between a DEQUANTIZE and a QUANTIZE,
because there are no int8 kernels for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from inference.prepare.calibrate import Pictures, Range
from inference.prepare.graph import Array, Net
from inference.prepare.quantize import affine, centred_codes, lay_int8, normalisation, round_all, zero_byte
from inference.prepare.ranges import Variant, choose_ranges
from inference.prepare.run import Runner
from inference.prepare.tfjs import Decode, Step
from inference.prepare.writer import TYPES, Affine, FileWriter, write_float

_CODES, _OPTIONS = schema.BuiltinOperator, schema.BuiltinOptions
_SAME_CODES = ("Reshape", "ExpandDims", "GatherNd", "Unpack")
_IN_FLOAT = ("Sqrt", "RealDiv")
_ARITHMETIC = {
    "AddV2": (_CODES.ADD, _OPTIONS.AddOptions, schema.AddOptionsT),
    "Sub": (_CODES.SUB, _OPTIONS.SubOptions, schema.SubOptionsT),
    "Mul": (_CODES.MUL, _OPTIONS.MulOptions, schema.MulOptionsT),
    "RealDiv": (_CODES.DIV, _OPTIONS.DivOptions, schema.DivOptionsT),
    "FloorDiv": (_CODES.FLOOR_DIV, _OPTIONS.FloorDivOptions, schema.FloorDivOptionsT),
    "Sqrt": (_CODES.SQRT, _OPTIONS.NONE, None),
    "GatherNd": (_CODES.GATHER_ND, _OPTIONS.GatherNdOptions, schema.GatherNdOptionsT),
}


def write_uncut(net: Net, decode: Decode, pictures: Pictures, variant: Variant) -> bytes:
    """The whole graph in INT8, one scale a channel; its output is float32 `keypoints`, 17 rows y, x, score."""
    writer = FileWriter()
    shapes, known = _watch(net, decode, pictures)
    lines = _Lines(writer, decode.constants, shapes, known)
    lines.normalise(net)
    codes = round_all(net, per_channel=True)
    affines = lay_int8(writer, net, choose_ranges(net, pictures, variant), codes=codes)
    for head, name in decode.heads.items():
        tensor = net.outputs[head]
        lines.there[name] = _Tensor(writer.index(tensor), net.shapes[tensor], "int8", affines[tensor])
    for step in decode.steps:
        lines.write(step)
    lines.finish(decode.output)
    return writer.finish({net.input: net.input}, {"keypoints": "keypoints"})


def compute(step: Step, arguments: Sequence[Array]) -> list[Array]:
    """What a step gives, in float32 and int32."""
    first = arguments[0]
    match step.operator:
        case "AddV2":
            return [first + arguments[1]]
        case "Sub":
            return [first - arguments[1]]
        case "Mul":
            return [first * arguments[1]]
        case "RealDiv":
            return [first / arguments[1]]
        case "FloorDiv":
            return [first // arguments[1]]
        case "Sqrt":
            return [np.sqrt(first)]
        case "Cast":
            return [first.astype(np.float32)]
        case "ArgMax":
            return [np.argmax(first, int(arguments[1])).astype(np.int32)]
        case "Reshape":
            return [first.reshape(arguments[1])]
        case "ExpandDims":
            return [np.expand_dims(first, int(arguments[1]))]
        case "GatherNd":
            return [first[tuple(np.moveaxis(arguments[1], -1, 0))]]
        case "Pack":
            return [np.stack(arguments, step.axis)]
        case "Unpack":
            return [np.take(first, index, step.axis) for index in range(first.shape[step.axis])]
        case "ConcatV2":
            return [np.concatenate(arguments[:-1], int(arguments[-1]))]
    raise AssertionError(f"the reader let {step.operator} through")


def _watch(net: Net, decode: Decode, pictures: Pictures) -> tuple[dict[str, Array], dict[str, Range]]:
    """One value of every tensor of the decode, for its shape and type, and the range over all pictures."""
    last: dict[str, Array] = {}
    known: dict[str, Range] = {}
    for heads in _heads(net, pictures()):
        last = {**decode.constants, **{name: heads[head] for head, name in decode.heads.items()}}
        for step in decode.steps:
            for name, value in zip(step.outs, compute(step, [last[source] for source in step.inputs]), strict=True):
                last[name] = value
                low, high = float(value.min()), float(value.max())
                before = known.get(name, Range(low, high))
                known[name] = Range(min(before.low, low), max(before.high, high))
    for name, constant in decode.constants.items():
        known[name] = Range(float(constant.min()), float(constant.max()))
    return last, known


def _heads(net: Net, pictures: Iterable[Array]) -> Iterable[Mapping[str, Array]]:
    yield from Runner(write_float(net)).over(pictures)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor in the file; float ones are there as int8 codes."""

    index: int
    shape: tuple[int, ...]
    dtype: str
    codes: Affine | None = None


@dataclass(slots=True)
class _Lines:
    """Writes the decode's steps one after the other."""

    writer: FileWriter
    constants: Mapping[str, Array]
    values: Mapping[str, Array]
    known: Mapping[str, Range]
    there: dict[str, _Tensor] = field(default_factory=dict)

    def normalise(self, net: Net) -> None:
        """The picture as the graph takes it: cast to real numbers, then shifted."""
        picture = self._new(net.input, net.input_shape, "uint8")
        real = self._new(f"{net.input}/float", net.input_shape, "float32")
        self._cast(picture, real)
        bytes_ = Affine(1.0, -128)
        coded = self._new(f"{net.input}/codes", net.input_shape, "int8", bytes_)
        self._operator(_CODES.QUANTIZE, 1, [real], [coded], _OPTIONS.QuantizeOptions, schema.QuantizeOptionsT())
        zero = np.array(zero_byte(net) - 128, np.int8)
        shift = _Tensor(self.writer.tensor("zero", (), "int8", zero, bytes_), (), "int8", bytes_)
        self._arithmetic(
            "Sub", 2, [coded, shift], self._new(normalisation(net).out, net.input_shape, "int8", centred_codes(net))
        )

    def write(self, step: Step) -> None:
        """One step, and what has to stand before and behind it."""
        match step.operator:
            case "Cast":
                raw = self._new(f"{step.out}/float", self.values[step.out].shape, "float32")
                self._cast(self._tensor(step.inputs[0]), raw)
                self._quantize(raw, step.out)
            case operator if operator in _IN_FLOAT:
                raw = self._new(f"{step.out}/float", self.values[step.out].shape, "float32")
                sources = [self._dequantized(name) for name in step.inputs]
                self._arithmetic(operator, 1, sources, raw)
                self._quantize(raw, step.out)
            case "Pack" | "ConcatV2":
                self._join(step)
            case "Unpack":
                options = schema.UnpackOptionsT()
                options.num, options.axis = len(step.outs), step.axis
                outputs = [self._out(name, step) for name in step.outs]
                self._operator(
                    _CODES.UNPACK, 2, [self._tensor(step.inputs[0])], outputs, _OPTIONS.UnpackOptions, options
                )
            case "Reshape" | "ExpandDims":
                shape = np.array(self.values[step.out].shape, np.int32)
                options = schema.ReshapeOptionsT()
                options.newShape = shape.tolist()
                size = self._constant(f"{step.out}/shape", shape)
                sources = [self._tensor(step.inputs[0]), size]
                out = self._out(step.out, step)
                self._operator(_CODES.RESHAPE, 1, sources, [out], _OPTIONS.ReshapeOptions, options)
            case "ArgMax":
                options = schema.ArgMaxOptionsT()
                options.outputType = schema.TensorType.INT32
                sources = [self._tensor(name) for name in step.inputs]
                out = self._out(step.out, step)
                self._operator(_CODES.ARG_MAX, 2, sources, [out], _OPTIONS.ArgMaxOptions, options)
            case operator:
                sources = [self._tensor(name) for name in step.inputs]
                out = self._out(step.out, step)
                whole = out.dtype == "int32" or operator == "GatherNd"
                self._arithmetic(operator, 1 if whole else 2, sources, out)

    def finish(self, output: str) -> None:
        """The float output."""
        source = self._tensor(output)
        out = self._new("keypoints", source.shape, "float32")
        self._operator(_CODES.DEQUANTIZE, 2, [source], [out], _OPTIONS.NONE, None)

    def _join(self, step: Step) -> None:
        names = step.inputs if step.operator == "Pack" else step.inputs[:-1]
        out = self._out(step.out, step)
        sources = [self._with_codes_of(out, name) for name in names]
        version = 2 if out.dtype == "int8" else 1
        if step.operator == "Pack":
            options = schema.PackOptionsT()
            options.valuesCount, options.axis = len(names), step.axis
            self._operator(_CODES.PACK, version, sources, [out], _OPTIONS.PackOptions, options)
        else:
            options = schema.ConcatenationOptionsT()
            options.axis = int(self.constants[step.inputs[-1]])
            self._operator(_CODES.CONCATENATION, version, sources, [out], _OPTIONS.ConcatenationOptions, options)

    def _cast(self, source: _Tensor, out: _Tensor) -> None:
        options = schema.CastOptionsT()
        options.inDataType, options.outDataType = (TYPES[tensor.dtype] for tensor in (source, out))
        self._operator(_CODES.CAST, 1, [source], [out], _OPTIONS.CastOptions, options)

    def _arithmetic(self, operator: str, version: int, sources: list[_Tensor], out: _Tensor) -> None:
        code, kind, options = _ARITHMETIC[operator]
        self._operator(code, version, sources, [out], kind, None if options is None else options())

    def _tensor(self, name: str) -> _Tensor:
        """The tensor of that name; a constant is written when it is first needed."""
        if name not in self.there:
            value = self.constants[name]
            if value.dtype == np.int32:
                self.there[name] = self._constant(name, value)
            else:
                codes = affine(self.known[name])
                rounded = np.clip(np.round(value / codes.scale) + codes.zero_point, -128, 127).astype(np.int8)
                index = self.writer.tensor(name, value.shape, "int8", rounded, codes)
                self.there[name] = _Tensor(index, value.shape, "int8", codes)
        return self.there[name]

    def _constant(self, name: str, value: Array) -> _Tensor:
        return _Tensor(self.writer.tensor(name, value.shape, "int32", value), value.shape, "int32")

    def _out(self, name: str, step: Step) -> _Tensor:
        value = self.values[name]
        if value.dtype == np.int32:
            self.there[name] = self._new(name, value.shape, "int32")
        else:
            codes = self._tensor(step.inputs[0]).codes if step.operator in _SAME_CODES else affine(self.known[name])
            self.there[name] = self._new(name, value.shape, "int8", codes)
        return self.there[name]

    def _with_codes_of(self, wanted: _Tensor, name: str) -> _Tensor:
        source = self._tensor(name)
        if source.codes == wanted.codes:
            return source
        again = self._new(f"{name}/again", source.shape, "int8", wanted.codes)
        self._operator(_CODES.QUANTIZE, 2, [source], [again], _OPTIONS.QuantizeOptions, schema.QuantizeOptionsT())
        return again

    def _dequantized(self, name: str) -> _Tensor:
        source = self._tensor(name)
        out = self._new(f"{name}/float", source.shape, "float32")
        self._operator(_CODES.DEQUANTIZE, 2, [source], [out], _OPTIONS.NONE, None)
        return out

    def _quantize(self, raw: _Tensor, name: str) -> None:
        self.there[name] = self._new(name, raw.shape, "int8", affine(self.known[name]))
        options = schema.QuantizeOptionsT()
        self._operator(_CODES.QUANTIZE, 1, [raw], [self.there[name]], _OPTIONS.QuantizeOptions, options)

    def _new(self, name: str, shape: tuple[int, ...], dtype: str, codes: Affine | None = None) -> _Tensor:
        return _Tensor(self.writer.tensor(name, shape, dtype, affine=codes), shape, dtype, codes)

    def _operator(
        self, code: int, version: int, sources: list[_Tensor], outputs: list[_Tensor], kind: int, options: Any
    ) -> None:
        inputs = [source.index for source in sources]
        self.writer.operator((code, version), inputs, [output.index for output in outputs], kind, options)

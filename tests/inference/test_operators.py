"""What a model file needs is known from its tables; damage in them is a refusal and nothing else."""

from __future__ import annotations

import contextlib
from pathlib import Path

import flatbuffers
import pytest
from ai_edge_litert import schema_py_generated as schema
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.errors import InferenceError
from inference.operators import check_operators, operators
from tests.inference.rig import MODEL


def one_operator(code: int, name: bytes | None = None, options: bytes | None = None) -> bytes:
    """A .tflite with a single node."""
    kind = schema.OperatorCodeT()
    kind.builtinCode, kind.deprecatedBuiltinCode, kind.customCode, kind.version = code, min(code, 127), name, 1
    node = schema.OperatorT()
    node.opcodeIndex, node.inputs, node.outputs = 0, [0], [0]
    node.customOptions = list(options) if options is not None else None
    graph = schema.SubGraphT()
    graph.tensors, graph.inputs, graph.outputs, graph.operators = [], [0], [0], [node]
    model = schema.ModelT()
    model.version, model.operatorCodes, model.subgraphs = 3, [kind], [graph]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


CUSTOM = int(schema.BuiltinOperator.CUSTOM)


@pytest.mark.parametrize(
    ("name", "message", "remedy"),
    [
        (b"LceQuantize", "is 'LceQuantize', which litert lacks", "prepare the model without it"),
        (b"", "is '', which litert lacks", "prepare the model without it"),
        (b"ops\n\x1b[31m", r"is 'ops\n\x1b[31m', which litert lacks", "prepare the model without it"),
        (b"FlexStridedSlice", "is 'FlexStridedSlice', which needs TensorFlow itself", "convert the model without"),
        (b"ethos-u", "is 'ethos-u': this file is compiled for an Arm Ethos-U (by Vela)", "name the original file"),
        (b"edgetpu-custom-op", "this file is compiled for a Coral Edge TPU", "name the original file"),
        # The runtime has it, and dies of it: a segmentation fault while it prepares.
        (b"TFLite_Detection_PostProcess", "('TFLite_Detection_PostProcess') has no options", "convert the model again"),
    ],
)
def test_a_custom_operator_that_nobody_has_is_named(tmp_path: Path, name: bytes, message: str, remedy: str) -> None:
    file = tmp_path / "m.tflite"
    file.write_bytes(one_operator(CUSTOM, name))
    with pytest.raises(InferenceError) as caught:
        check_operators(file, (), "litert")
    assert caught.value.message.startswith("cannot load m.tflite: operator 0 ")
    assert message in caught.value.message
    assert remedy in caught.value.remedy
    assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("content", "custom"),
    [
        (one_operator(int(schema.BuiltinOperator.ADD)), ()),
        (one_operator(CUSTOM, b"ethos-u"), ("ethos-u",)),
        (one_operator(CUSTOM, b"TFLite_Detection_PostProcess", b"\1\2"), ()),
    ],
)
def test_what_the_runtime_or_the_delegate_has_is_taken(tmp_path: Path, content: bytes, custom: tuple[str, ...]) -> None:
    file = tmp_path / "m.tflite"
    file.write_bytes(content)
    check_operators(file, custom, "litert")


def test_every_operator_of_the_prepared_model_is_seen() -> None:
    if not MODEL.joinpath("cpu.tflite").exists():
        pytest.skip("build/models/movenet-lightning is missing: run `make model`")
    assert len(operators(MODEL / "cpu.tflite")) > 50


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, 400), value=st.integers(0, 255), cut=st.integers(0, 400))
def test_a_damaged_table_is_refused_or_read_and_never_worse(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int, cut: int
) -> None:
    raw = bytearray(one_operator(CUSTOM, b"Some"))
    raw[at % len(raw)] = value
    file = tmp_path_factory.mktemp("damaged") / "m.tflite"
    file.write_bytes(raw[: max(8, len(raw) - cut)] if cut < 200 else raw)
    with contextlib.suppress(InferenceError):
        check_operators(file, (), "litert")


@pytest.mark.parametrize("content", [b"", b"TFL3", b"\0" * 64, b"\xff" * 64, b"\0\0\0\0TFL3 placeholder"])
def test_what_is_no_model_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "m.tflite"
    file.write_bytes(content)
    with pytest.raises(InferenceError, match=r"^cannot load m\.tflite: "):
        operators(file)

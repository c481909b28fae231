"""What a finished file asks of the board that loads it, read from the file itself.

The schema it is written in, the least TensorFlow Lite that has its operators in these versions, and of a file compiled
for an Ethos-U the NPU that it was compiled for. Follows TensorFlow Lite's tools/versioning/runtime_version.cc and the
header that Arm's driver compares with the hardware (`verify_optimizer_config`).
"""

from __future__ import annotations

import struct
from typing import Any

from ai_edge_litert import schema_py_generated as schema

_CODES = schema.BuiltinOperator
# The least TensorFlow Lite with this operator in this version.
SINCE = {
    (_CODES.CONV_2D, 3): "1.14.0",
    (_CODES.DEPTHWISE_CONV_2D, 3): "1.14.0",
    (_CODES.ADD, 2): "1.14.0",
    (_CODES.SUB, 2): "1.14.0",
    (_CODES.RESIZE_BILINEAR, 3): "2.2.0",
    (_CODES.LOGISTIC, 2): "1.14.0",
    (_CODES.PAD, 2): "1.14.0",
    (_CODES.AVERAGE_POOL_2D, 2): "1.14.0",
    (_CODES.MAX_POOL_2D, 2): "1.14.0",
    (_CODES.RESHAPE, 1): "1.5.0",
    (_CODES.SOFTMAX, 2): "1.14.0",
    (_CODES.QUANTIZE, 2): "1.15.0",
}
_ETHOS_U = b"ethos-u"
_HEADER = struct.Struct("<4sIII")
_PRODUCTS = {0: "u55", 1: "u65"}


def made_for(content: bytes) -> dict[str, str]:
    """The part of a file's record that the file itself tells."""
    model = schema.Model.GetRootAs(content)
    codes = [model.OperatorCodes(index) for index in range(model.OperatorCodesLength())]
    least = [SINCE.get((code.BuiltinCode(), code.Version()), "") for code in codes]
    known = {
        "schema": str(model.Version()),
        "runtime": max(least, key=lambda version: [int(part) for part in version.split(".") if part], default=""),
    }
    if any(code.CustomCode() == _ETHOS_U for code in codes):
        known |= _ethos_u(model)
    return {what: version for what, version in known.items() if version}


def _ethos_u(model: Any) -> dict[str, str]:
    graph = model.Subgraphs(0)
    for index in range(graph.OperatorsLength()):
        operator = graph.Operators(index)
        if model.OperatorCodes(operator.OpcodeIndex()).CustomCode() == _ETHOS_U:
            commands = model.Buffers(graph.Tensors(operator.Inputs(0)).Buffer()).DataAsNumpy().tobytes()
            return _configuration(commands)
    return {}


def _configuration(commands: bytes) -> dict[str, str]:
    """Of the driver's header: `COP1`, a tag, the configuration's register and the architecture's."""
    mark, _, configuration, _ = _HEADER.unpack_from(commands)
    product = _PRODUCTS.get(configuration >> 28)
    if mark != b"COP1" or product is None:
        return {}
    macs = 1 << (configuration & 0xF)
    return {"npu": f"ethos-{product}-{macs}", "command-stream": str(configuration >> 4 & 0xF)}

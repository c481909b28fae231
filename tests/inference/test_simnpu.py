"""The simulated NPU in the real runtime: exact results, contexts, the compile cache.

The network is small and made here, so that these tests need no download; one looks at the prepared MoveNet where
`make model` has left it.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from inference import litert
from inference.measure.placement import place
from inference.prepare.run import Kernels, Runner
from inference.prepare.writer import write_float
from tests.inference.simnpu import ALL_OPERATORS, Child, on_npu
from tests.models import PREPARED
from tests.networks import SIDE, pictures, small_model, small_net

# ---- results ----


@pytest.mark.parametrize("per_channel", [True, False], ids=["per channel", "per tensor"])
def test_every_operator_is_computed_bit_by_bit_as_the_reference_kernels_do(library, tmp_path, per_channel):
    file = tmp_path / "model.tflite"
    file.write_bytes(small_model(per_channel=per_channel))
    npu = on_npu(library, file, SIDE, ("scores", "features"))
    reference = Runner(file.read_bytes(), Kernels.REFERENCE)
    for picture in pictures():
        expected, got = reference(picture), npu.infer(picture[None])
        for name in ("scores", "features"):
            np.testing.assert_array_equal(got[name], expected[name])
            assert np.ptp(got[name]) > 0


def test_movenet_runs_on_it_whole_and_bit_by_bit_as_the_reference_kernels_do(library):
    if not (PREPARED / "cpu.tflite").exists():
        pytest.skip("no prepared model: run `make model`")
    heads = ("center", "regress", "heatmap", "offset")
    npu = on_npu(library, PREPARED / "cpu.tflite", 192, heads)
    reference = Runner((PREPARED / "cpu.tflite").read_bytes(), Kernels.REFERENCE)
    picture = np.load(PREPARED / "golden.npy")
    expected, got = reference(picture), npu.infer(picture[None])
    for name in heads:
        np.testing.assert_array_equal(got[name], expected[name])


# ---- what it claims ----


def placement(library: Path, model: Path, **options: str):
    return place(model, litert.create_delegate(str(library), options))


def test_with_every_operator_claimed_nothing_stays_on_the_cpu(library, model):
    found = placement(library, model, ops=ALL_OPERATORS)
    assert (sum(found.accelerated.values()), dict(found.cpu), found.partitions) == (10, {}, 1)
    assert found.summary() == "10 of 10 operators in 1 piece"


def test_it_claims_only_the_operators_it_was_told_to(library, model):
    found = placement(library, model, ops="CONV_2D,RESIZE_BILINEAR")
    assert dict(found.accelerated) == {"CONV_2D": 4, "RESIZE_BILINEAR": 1}
    assert dict(found.cpu) == {"ADD": 1, "DEPTHWISE_CONV_2D": 2, "LOGISTIC": 1, "QUANTIZE": 1}
    assert found.partitions == 3


def test_it_claims_no_more_nodes_than_its_limit(library, model):
    found = placement(library, model, ops=ALL_OPERATORS, max_nodes="4")
    assert sum(found.accelerated.values()) == 4


def test_it_says_why_it_refuses_an_operator(library, tmp_path):
    net, log = small_net(), tmp_path / "log"
    file = tmp_path / "float.tflite"
    file.write_bytes(write_float(net))
    assert placement(library, file, ops="CONV_2D", log=str(log)).partitions == 0
    assert re.search(r"^refused CONV_2D 1: its output is not int8$", log.read_text(), re.MULTILINE)


# ---- options ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"colour": "green"}, "simnpu: unknown option 'colour'"),
        ({"ops": "CONV_2D,SOFTMAX"}, "simnpu: cannot claim operator 'SOFTMAX': it is not one of ours"),
        ({"contexts": "0"}, "simnpu: option contexts needs a number of at least 1, not '0'"),
        ({"warmup_ms": "soon"}, "simnpu: option warmup_ms needs a number of at least 0, not 'soon'"),
        ({"log": "x" * 600}, "simnpu: option log is longer than 511 bytes"),
        ({"node": "/nowhere/simnpu0"}, "simnpu: cannot open /nowhere/simnpu0: No such file or directory"),
    ],
)
def test_a_wrong_option_is_refused_with_its_name(library, options, words):
    with pytest.raises(litert.DelegateRefusedError) as caught:
        litert.create_delegate(str(library), options)
    assert words in caught.value.message


# ---- contexts ----


@pytest.fixture
def null_node(tmp_path: Path) -> Path:
    node = tmp_path / "simnpu0"
    try:
        os.mknod(node, stat.S_IFCHR | 0o660, os.makedev(1, 3))
    except PermissionError:
        node.touch()
    return node


def test_the_node_grants_as_many_contexts_as_it_has_and_gives_them_back(library, null_node):
    options = {"node": str(null_node), "contexts": "2"}
    first = litert.create_delegate(str(library), options)
    second = litert.create_delegate(str(library), options)
    with pytest.raises(
        litert.DelegateRefusedError, match=r"cannot get a context .*: Device or resource busy \(it grants 2\)"
    ):
        litert.create_delegate(str(library), options)
    del first
    third = litert.create_delegate(str(library), options)
    assert second is not third


def test_a_killed_holder_frees_its_context(library, model, null_node):
    with Child(library, model, node=str(null_node), mode="hang") as holder:
        holder.wait_for("loaded")
        with pytest.raises(litert.DelegateRefusedError, match="Device or resource busy"):
            litert.create_delegate(str(library), {"node": str(null_node)})
    litert.create_delegate(str(library), {"node": str(null_node)})


# ---- the compile cache ----


def test_the_first_invoke_compiles_and_the_cache_is_keyed_by_the_model(library, model, tmp_path):
    other = tmp_path / "other.tflite"
    other.write_bytes(small_model(seed=8))
    log, cache = tmp_path / "log", tmp_path / "cache"
    options = {"log": str(log), "cache": str(cache), "warmup_ms": "120"}
    took = []
    for file in (model, model, other, other):
        npu = on_npu(library, file, SIDE, ("scores",), **options)
        before = time.monotonic()
        npu.infer(pictures(1)[0][None])
        took.append(time.monotonic() - before)
        npu.infer(pictures(1)[0][None])
    kinds = re.findall(r"^compile: (cached|120 ms)", log.read_text(), re.MULTILINE)
    assert kinds == ["120 ms", "cached", "120 ms", "cached"]
    assert took[0] >= 0.12
    assert took[2] >= 0.12
    assert len(cache.read_text().split()) == 2


# ---- the other runtime ----

OLD_RUNTIME = """
import sys
import numpy as np
from tflite_runtime.interpreter import Interpreter, OpResolverType, load_delegate
library, model, operators, side = sys.argv[1:]
def run(resolver, delegates):
    it = Interpreter(model, experimental_op_resolver_type=resolver, experimental_delegates=delegates)
    it.allocate_tensors()
    runner = it.get_signature_runner()
    frame = np.random.default_rng(3).integers(0, 256, (1, int(side), int(side), 3), dtype=np.uint8)
    return runner(image=frame)
delegate = load_delegate(library, {"ops": operators})
mine, theirs = run(OpResolverType.BUILTIN_REF, [delegate]), run(OpResolverType.BUILTIN_REF, [])
assert all(np.array_equal(mine[name], theirs[name]) for name in theirs), "differs"
print("equal")
"""


@pytest.mark.long
def test_it_computes_the_same_in_tflite_runtime(library, model, tflite_runtime):
    done = subprocess.run(
        [tflite_runtime, "-c", OLD_RUNTIME, library, model, ALL_OPERATORS, str(SIDE)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "equal", done.stderr

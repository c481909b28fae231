"""One process, one backend: slot numbers in, poses out.

A worker is forked by the zygote for one generation and lives until it is killed, its pipe ends, or its supervisor dies.
It says which stage it enters, because each has its own deadline, and why it could not go on where it can know that. It
judges the golden frame itself (numpy lives here and not in the supervisor); whether the result is good enough is not
its decision.
"""

from __future__ import annotations

import hashlib
import os
import resource
import select
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from inference import litert
from inference.backend import Backend
from inference.compiled import CompiledGraphs, compiled_graphs, driver_identity, wanted
from inference.errors import InferenceError
from inference.frames import SIDE, SLOTS, FrameRing
from inference.installed import installed_versions
from inference.model import Model, load_centre_weight, load_golden_frame, load_model
from inference.operators import check_operators
from inference.pairing import ALWAYS, Rule, mismatch
from inference.policy import Reason
from inference.pose import decode_heads, golden_oks
from inference.records import RECORD_LIMIT, Kind, Token, WorkerPose, pack_note

Frame = npt.NDArray[np.uint8]
Pose = npt.NDArray[np.float32]
_MESSAGE_LIMIT = 600
_LOOK_S = 0.0001


class StageError(Exception):
    """A worker that cannot go on, with the reason the policy will see."""

    def __init__(self, reason: Reason, cause: InferenceError, *, permanent: bool = False) -> None:
        super().__init__(cause.message)
        self.reason = reason
        self.cause = cause
        self.permanent = permanent


class PoseModel:
    """A backend, the decode of its heads and the golden frame it is judged by."""

    def __init__(self, model: Model, accelerator: str, backend: Backend) -> None:
        names = model.document.output.names
        self._heads = (names.center, names.regress, names.heatmap, names.offset)
        self._weight = load_centre_weight(model)
        self._backend = backend
        self.golden_frame: Frame = load_golden_frame(model)[np.newaxis]
        self.golden_pose: Pose = np.array(model.golden_pose(accelerator), np.float32)
        self.oks_min = model.oks_min(accelerator)

    def infer(self, frame: Frame) -> Pose:
        """The pose float32[17, 3] in a frame uint8[1, side, side, 3]."""
        outputs = self._backend.infer(frame)
        center, regress, heatmap, offset = (outputs[name] for name in self._heads)
        return np.asarray(decode_heads(center, regress, heatmap, offset, self._weight), np.float32)


def serve(order: Mapping[str, Any], frames_fd: int, tokens_in: int, answers_out: int) -> None:
    """Prepare the backend that `order` describes and answer tokens until their pipe ends."""
    _take_share(order)
    try:
        model, pose_model, graphs = _prepare(order, answers_out)
    except StageError as error:
        report_failure(answers_out, error.reason, error.cause, permanent=error.permanent)
        return
    ready = {"stage": "ready", "oks_min": pose_model.oks_min, "model": model.name, "version": model.version}
    compiles = graphs is not None and graphs.cold
    os.write(answers_out, pack_note({**ready, "runtime": litert.RUNTIME, "compiles": compiles}))
    os.set_blocking(tokens_in, False)
    ring = FrameRing.attach(frames_fd)
    slots = [np.frombuffer(ring.view(slot), np.uint8).reshape(1, SIDE, SIDE, 3) for slot in range(SLOTS)]
    while raw := _next_token(tokens_in):
        token = Token.unpack(raw)
        golden = token.kind is Kind.GOLDEN
        try:
            answer = _answer(pose_model, token, pose_model.golden_frame if golden else slots[token.slot])
        except StageError as error:
            report_failure(answers_out, error.reason, error.cause)
            return
        except litert.invoke_errors() as error:
            cause = InferenceError(f"cannot run the model: {_one_line(error)}")
            report_failure(answers_out, Reason.DEVICE_GONE if _missing(order) else Reason.ERROR, cause)
            return
        os.write(answers_out, answer.pack())
        if graphs is not None and golden and answer.oks >= pose_model.oks_min:
            graphs.prove()
            graphs = None


def report_failure(answers_out: int, reason: Reason, cause: InferenceError, *, permanent: bool = False) -> None:
    """Tell the supervisor why this worker ends; it may have gone meanwhile."""
    fields = {"stage": "failed", "reason": reason, "message": cause.message[:_MESSAGE_LIMIT], "permanent": permanent}
    os.write(answers_out, pack_note({**fields, "remedy": cause.remedy[:_MESSAGE_LIMIT]}))


def _answer(pose_model: PoseModel, token: Token, frame: Frame) -> WorkerPose:
    begin = time.monotonic_ns()
    pose = pose_model.infer(frame)
    busy_ns = time.monotonic_ns() - begin
    if not np.isfinite(pose).all():
        raise StageError(
            Reason.WRONG_RESULT, InferenceError("cannot use the answer: it has values that are no numbers")
        )
    oks = golden_oks(pose, pose_model.golden_pose) if token.kind is Kind.GOLDEN else 0.0
    return WorkerPose(token.generation, token.sequence, oks, busy_ns, pose.tobytes())


def _next_token(tokens_in: int) -> bytes:
    """The next token; empty at the end. Looks for a moment before it sleeps: to be woken takes longer than that."""
    until = time.monotonic() + _LOOK_S
    while time.monotonic() < until:
        try:
            return os.read(tokens_in, RECORD_LIMIT)
        except BlockingIOError:
            continue
    select.select([tokens_in], [], [])
    return os.read(tokens_in, RECORD_LIMIT)


def _prepare(order: Mapping[str, Any], answers_out: int) -> tuple[Model, PoseModel, CompiledGraphs | None]:
    accelerator = str(order["accelerator"])
    try:
        model = load_model(Path(order["model_dir"]))
        file = model.file_for(accelerator)
        check_operators(file, order["operators"], litert.RUNTIME)
    except InferenceError as error:
        raise StageError(Reason.BAD_MODEL, error, permanent=True) from error
    if model.input_size != SIDE:
        cause = InferenceError(f"cannot use {model.name}: its input is {model.input_size} pixels, frames have {SIDE}")
        raise StageError(Reason.BAD_MODEL, cause, permanent=True)
    delegate, graphs = None, None
    if order["delegate"]:
        delegate, graphs = _create(order, model, file)
    else:
        _check_pairing(order, model)
    os.write(answers_out, pack_note({"stage": "prepare"}))
    names = model.document.output.names
    heads = (names.center, names.regress, names.heatmap, names.offset)
    try:
        backend = litert.prepare(file, delegate, int(order["threads"]), model.document.input.name, heads, SIDE)
        return model, PoseModel(model, accelerator, backend), graphs
    except litert.DelegateRefusedError as error:
        if damage := litert.damage(file):
            raise StageError(Reason.BAD_MODEL, damage, permanent=True) from error
        raise StageError(_refusal(error), error) from error
    except InferenceError as error:
        raise StageError(Reason.BAD_MODEL, error, permanent=True) from error


def _create(order: Mapping[str, Any], model: Model, file: Path) -> tuple[Any, CompiledGraphs | None]:
    if missing := _missing(order):
        cause = InferenceError(f"cannot use the accelerator: {missing} does not exist", "load the driver, or replug it")
        raise StageError(Reason.DEVICE_GONE, cause)
    path, options, env = order["delegate"]["path"], order["delegate"]["options"], order["env"]
    graphs = None
    try:
        if wanted(options, env):
            graphs = _graphs(order, file)
            options, env = graphs.fill_in(options), graphs.fill_in(env)
        # Vendors' libraries read it while they are loaded.
        os.environ.update(env)
        _check_pairing(order, model)
        return litert.create_delegate(path, options), graphs
    except litert.DelegateRefusedError as error:
        raise StageError(_refusal(error), error) from error


def _check_pairing(order: Mapping[str, Any], model: Model) -> None:
    sources = order["pairing"]
    found = litert.versions() | installed_versions(sources, order["delegate"]["path"] if sources else "")
    rules = {**ALWAYS, **{what: Rule(source["rule"]) for what, source in sources.items()}}
    if wrong := mismatch(model.made_for(order["accelerator"]), found, rules):
        raise StageError(Reason.MISMATCH, wrong.error(model.name, order["accelerator"]), permanent=True)


def _graphs(order: Mapping[str, Any], file: Path) -> CompiledGraphs:
    with file.open("rb") as content:
        model = hashlib.file_digest(content, "sha256").hexdigest()
    driver = driver_identity(order["delegate"]["path"], order["modules"])
    identity = [model, litert.RUNTIME, litert.RUNTIME_VERSION, *driver]
    try:
        return compiled_graphs(Path(order["cache_dir"]), order["accelerator"], identity)
    except OSError as error:
        # A full disk costs a compile at every start, not the NPU.
        print(f"cannot keep compiled graphs: {error.filename}: {error.strerror}", file=sys.stderr)
        return CompiledGraphs(Path(tempfile.mkdtemp(prefix="avocado-compiled-")))


def _refusal(error: InferenceError) -> Reason:
    # There is no error number in this interface; the library's words are all there is.
    return Reason.BUSY if "busy" in error.message.lower() else Reason.REFUSED


def _missing(order: Mapping[str, Any]) -> str | None:
    return next((node for node in order["nodes"] if not Path(node).exists()), None)


def _take_share(order: Mapping[str, Any]) -> None:
    # A core file of a crashed worker would delay the notice of its death by as long as it takes to write.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if order["memory_bytes"]:
        resource.setrlimit(resource.RLIMIT_DATA, (order["memory_bytes"], order["memory_bytes"]))
    if order["nice"]:
        os.setpriority(os.PRIO_PROCESS, 0, order["nice"])
    if order["cpus"]:
        os.sched_setaffinity(0, order["cpus"])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

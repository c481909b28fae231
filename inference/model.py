"""A model folder: model.json and the files it names, one per accelerator and always one for the CPU.

`load_model` believes nothing it has not checked: sizes are bounded before reading, the document is checked against its
schema, every file against its sha256. A folder that fails is refused with one message that names the file and a remedy.
Importing this module loads neither numpy nor pydantic, because the supervisor needs the first of them nowhere.
"""

from __future__ import annotations

import hashlib
import io
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference.errors import InferenceError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from inference.model_schema import ModelDocument, OtherDocument, Requirements

DOCUMENT = "model.json"
CPU = "cpu"
_DOCUMENT_LIMIT_BYTES = 1 << 20
_ARRAY_LIMIT_BYTES = 16 << 20
_MODEL_LIMIT_BYTES = 512 << 20
_SCHEMA = 1
_OTHER_TASKS = ("classification", "tensors")
_DEPLOY_AGAIN = "deploy the model again, or prepare it again with `avocado-infer prepare`"


@dataclass(frozen=True, slots=True)
class Model:
    """A folder whose document and files have been checked."""

    folder: Path
    document: ModelDocument

    @property
    def name(self) -> str:
        """The model's name, without its version."""
        return self.document.name

    @property
    def version(self) -> str:
        """The version `prepare` gave it."""
        return self.document.version

    @property
    def requirements(self) -> Requirements:
        """What a board must achieve with it."""
        return self.document.requirements

    @property
    def input_size(self) -> int:
        """Side of the square input, in pixels."""
        return self.document.input.shape[1]

    @property
    def accelerators(self) -> tuple[str, ...]:
        """Names of the accelerator profiles it has files for, the CPU among them."""
        return tuple(sorted(self.document.files))

    def file_for(self, accelerator: str) -> Path:
        """The file that this accelerator loads; InferenceError when the model was not prepared for it."""
        self._require(accelerator)
        return self.folder / self.document.files[accelerator].path

    def made_for(self, accelerator: str) -> dict[str, str]:
        """The versions this accelerator's file was made with and for."""
        self._require(accelerator)
        file = self.document.files[accelerator]
        return {**file.toolchain, **file.pairing}

    def golden_pose(self, accelerator: str) -> tuple[tuple[float, float, float], ...]:
        """The 17 rows (y, x, score) this accelerator gave for the golden frame when the model was prepared."""
        self._require(accelerator)
        return self.document.golden.poses[accelerator]

    def oks_min(self, accelerator: str) -> float:
        """The least similarity with the golden pose that passes on this accelerator."""
        self._require(accelerator)
        return self.document.golden.oks_min[accelerator]

    def _require(self, accelerator: str) -> None:
        if accelerator not in self.document.files:
            raise InferenceError(
                f"cannot load {self.name} for {accelerator}: it was prepared for {', '.join(self.accelerators)}",
                f"prepare it with `avocado-infer prepare MODEL --target {accelerator}`",
            )


def load_model(folder: Path) -> Model:
    """Read and verify a model folder; InferenceError names what is wrong with it."""
    document = _pose_document(folder, read_document(folder))
    expected = dict(document.digests)
    for file in document.files.values():
        if expected.setdefault(file.path, file.sha256) != file.sha256:
            raise _damaged(folder, f"{DOCUMENT} gives {file.path} two different sha256")
    for name, sha256 in expected.items():
        found = _digest(folder, name)
        if found != sha256:
            raise _damaged(folder, f"{name} has sha256 {found[:12]}, {DOCUMENT} says {sha256[:12]}")
    return Model(folder, document)


def read_document(folder: Path) -> ModelDocument | OtherDocument:
    """The folder's model.json, checked against its schema; none of the files it names is looked at."""
    return _parse(folder, _read(folder, DOCUMENT, _DOCUMENT_LIMIT_BYTES))


def write_document(folder: Path, fields: Mapping[str, Any]) -> None:
    """Check `fields` as the loader would, then write them as the folder's model.json."""
    text = json.dumps(fields, indent=1, sort_keys=True) + "\n"
    _parse(folder, text.encode())
    (folder / DOCUMENT).write_text(text)


def load_golden_frame(model: Model) -> npt.NDArray[np.uint8]:
    """The golden frame, uint8[size, size, 3]."""
    frame = _load_array(model, model.document.golden.frame)
    size = model.input_size
    if frame.dtype.name != "uint8" or frame.shape != (size, size, 3):
        raise _damaged(model.folder, f"the golden frame is {frame.dtype}{list(frame.shape)}")
    return frame


def load_centre_weight(model: Model) -> npt.NDArray[np.float32]:
    """The map that makes MoveNet prefer the person in the middle, float32[size / 4, size / 4]."""
    weight = _load_array(model, model.document.output.centre_weight)
    side = model.input_size // 4
    if weight.dtype.name != "float32" or weight.shape != (side, side):
        raise _damaged(model.folder, f"the centre weight is {weight.dtype}{list(weight.shape)}")
    return weight


def _pose_document(folder: Path, document: ModelDocument | OtherDocument) -> ModelDocument:
    from inference.model_schema import ModelDocument

    if isinstance(document, ModelDocument):
        return document
    raise InferenceError(
        f"cannot load model {folder}: its task is {document.task}, and the pose service runs pose models",
        "give the service a pose model; another program may run this one",
    )


def _parse(folder: Path, raw: bytes) -> ModelDocument | OtherDocument:
    # Imported here: only who loads a model pays for pydantic.
    from pydantic import ValidationError

    from inference.model_schema import ModelDocument, OtherDocument

    try:
        fields = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, f"{DOCUMENT} is not JSON") from error
    if not isinstance(fields, dict):
        raise _damaged(folder, f"{DOCUMENT} is not a JSON object")
    number = fields.get("schema")
    if isinstance(number, int) and number > _SCHEMA:
        raise InferenceError(
            f"cannot load model {folder}: {DOCUMENT} has schema {number}, this program reads up to {_SCHEMA}",
            "update the pose-app extension, or prepare the model with the version installed here",
        )
    try:
        if fields.get("task") in _OTHER_TASKS:
            return OtherDocument.model_validate_json(raw)
        return ModelDocument.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        raise _damaged(folder, f"{DOCUMENT}: {where + ': ' if where else ''}{what}") from error


def _load_array(model: Model, name: str) -> npt.NDArray[Any]:
    import numpy as np

    try:
        array = np.load(io.BytesIO(_read(model.folder, name, _ARRAY_LIMIT_BYTES)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise _damaged(model.folder, f"{name} is not a numpy array") from error
    if not isinstance(array, np.ndarray):
        raise _damaged(model.folder, f"{name} is not a numpy array")
    return array


def _read(folder: Path, name: str, limit_bytes: int) -> bytes:
    path = _regular(folder, name, limit_bytes)
    with path.open("rb") as file:
        return file.read(limit_bytes)


def _digest(folder: Path, name: str) -> str:
    with _regular(folder, name, _MODEL_LIMIT_BYTES).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _regular(folder: Path, name: str, limit_bytes: int) -> Path:
    path = folder / name
    try:
        status = path.stat()
    except OSError as error:
        raise _damaged(folder, f"{name}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise _damaged(folder, f"{name} is not a regular file")
    if status.st_size > limit_bytes:
        raise _damaged(folder, f"{name} has {status.st_size} bytes, more than {limit_bytes}")
    return path


def _damaged(folder: Path, cause: str) -> InferenceError:
    return InferenceError(f"cannot load model {folder}: {cause}", _DEPLOY_AGAIN)

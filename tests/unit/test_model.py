"""The loader of model folders: what it gives, and every refusal with its exact words."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from inference.errors import InferenceError
from inference.model import load_centre_weight, load_golden_frame, load_model, write_document
from tests import models

DEPLOY_AGAIN = "deploy the model again, or prepare it again with `avocado-infer prepare`"


@pytest.fixture
def folder(tmp_path):
    return models.placeholder_model(tmp_path / "model")


def change(folder, edit):
    document = models.read(folder)
    edit(document)
    models.write(folder, document)


def test_a_good_folder_gives_its_files_golden_frame_and_limits(folder):
    model = load_model(folder)
    assert (model.name, model.version, model.accelerators) == ("placeholder", "1", ("cpu", "virtual"))
    assert model.file_for("virtual") == folder / "cpu.tflite"
    assert model.golden_pose("cpu")[0] == (0.1, 0.5, 0.8)
    assert model.oks_min("virtual") == 0.9
    assert model.requirements.latency_p95_ms == 50.0
    assert load_golden_frame(model).shape == (192, 192, 3)
    assert load_centre_weight(model).dtype == np.float32


def test_an_accelerator_it_was_not_prepared_for_is_refused_by_name(folder):
    with pytest.raises(InferenceError) as caught:
        load_model(folder).file_for("imx8mp-vx")
    assert caught.value.message == "cannot load placeholder for imx8mp-vx: it was prepared for cpu, virtual"
    assert caught.value.remedy == "prepare it with `avocado-infer prepare MODEL --target imx8mp-vx`"


def damage_document(folder):
    (folder / "model.json").write_bytes(b"{")


def remove_file(folder):
    (folder / "cpu.tflite").unlink()


def flip_a_byte(folder):
    (folder / "cpu.tflite").write_bytes(b"\0\0\0\0TFL3 plaseholder")


def flip_the_golden_frame(folder):
    np.save(folder / "golden.npy", np.ones((192, 192, 3), np.uint8))


def folder_in_place_of_a_file(folder):
    remove_file(folder)
    (folder / "cpu.tflite").mkdir()


def huge_document(folder):
    (folder / "model.json").write_bytes(b" " * ((1 << 20) + 1))


def path_out_of_the_folder(folder):
    change(folder, lambda d: d["files"]["cpu"].update(path="../cpu.tflite"))


def no_cpu(folder):
    change(folder, lambda d: d["files"].pop("cpu"))


def no_golden_pose(folder):
    change(folder, lambda d: d["golden"]["poses"].pop("virtual"))


def pose_of_sixteen_points(folder):
    change(folder, lambda d: d["golden"]["poses"]["cpu"].pop())


def a_number_as_text(folder):
    change(folder, lambda d: d["requirements"].update(latency_p95_ms="50"))


def an_escape_in_a_version(folder):
    change(folder, lambda d: d["files"]["cpu"].update(pairing={"delegate": "1.0\x1b[2J"}))


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (damage_document, "model.json is not JSON"),
        (remove_file, "cpu.tflite: No such file or directory"),
        (flip_a_byte, "cpu.tflite has sha256 "),
        (flip_the_golden_frame, "golden.npy has sha256 "),
        (folder_in_place_of_a_file, "cpu.tflite is not a regular file"),
        (huge_document, "model.json has 1048577 bytes, more than 1048576"),
        (path_out_of_the_folder, "model.json: files.cpu.path: String should match pattern"),
        (no_cpu, "model.json: files has no entry for the cpu, which every model needs as its fallback"),
        (no_golden_pose, "model.json: golden has no pose or no oks_min for virtual"),
        (pose_of_sixteen_points, "model.json: golden.poses.cpu: "),
        (an_escape_in_a_version, "model.json: files.cpu.pairing.delegate: String should match pattern"),
        (a_number_as_text, "model.json: requirements.latency_p95_ms: Input should be a valid number"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_damaged_folder_is_refused_naming_the_damage(folder, damage, cause):
    damage(folder)
    with pytest.raises(InferenceError) as caught:
        load_model(folder)
    assert caught.value.message.startswith(f"cannot load model {folder}: {cause}")
    assert caught.value.remedy == DEPLOY_AGAIN


def test_a_newer_schema_is_refused_politely_whatever_else_it_holds(folder):
    models.write(folder, {"schema": 2, "files": "elsewhere"})
    with pytest.raises(InferenceError) as caught:
        load_model(folder)
    assert caught.value.message == (f"cannot load model {folder}: model.json has schema 2, this program reads up to 1")


def test_keys_from_a_newer_prepare_are_ignored(folder):
    change(folder, lambda d: d.update(colour="green"))
    assert load_model(folder).name == "placeholder"


def test_what_the_loader_would_refuse_is_never_written(folder):
    before = (folder / "model.json").read_bytes()
    with pytest.raises(InferenceError):
        write_document(folder, {**models.read(folder), "task": "dance"})
    assert (folder / "model.json").read_bytes() == before
    write_document(folder, models.read(folder))
    assert load_model(folder).name == "placeholder"


def test_the_golden_frame_must_have_the_shape_of_the_input(folder):
    np.save(folder / "golden.npy", np.zeros((8, 8, 3), np.uint8))
    change(folder, lambda d: d["digests"].update({"golden.npy": models.sha256(folder / "golden.npy")}))
    with pytest.raises(InferenceError, match=r"the golden frame is uint8\[8, 8, 3\]"):
        load_golden_frame(load_model(folder))


def test_importing_the_loader_loads_neither_numpy_nor_pydantic():
    code = "import sys, inference.model; print({'numpy', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.strip() == "set()"


def test_loading_a_model_never_loads_numpy(folder):
    code = (
        "import sys, pathlib, inference.model as m;"
        f"m.load_model(pathlib.Path({str(folder)!r})); print('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.strip() == "False"

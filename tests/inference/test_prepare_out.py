"""Where `prepare` writes: nothing of anybody's is lost, what is wrong with the folder is said before any work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from inference.cli import main
from inference.prepare import destination
from inference.prepare.writer import write_float
from tests import models
from tests.networks import SIDE, small_net

ANOTHER = "name another folder with --out"
EMPTY_IT = f"{ANOTHER}, or empty that one"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A float model with pictures beside it."""
    draw = np.random.default_rng(2)
    for name, count in {"calibration": 4, "heldout": 12}.items():
        (tmp_path / name).mkdir()
        for index in range(count):
            noise = draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
            Image.fromarray(noise).save(tmp_path / name / f"{index:02d}.png")
    path = tmp_path / "model.tflite"
    path.write_bytes(write_float(small_net()))
    return path


def prepare(model: Path, out: Path | str, *targets: str) -> int:
    words = [word for name in targets or ("cpu",) for word in ("--target", name)]
    return main(["prepare", str(model), "--out", str(out), *words])


def everything(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}


def refused(model: Path, out: Path | str, capsys: pytest.CaptureFixture[str], *, cause: str, remedy: str) -> None:
    """These words and no others, no line of any work before them, and every file as it was."""
    before = everything(model.parent)
    assert prepare(model, out) == 1
    assert capsys.readouterr().err == f"avocado-infer: cannot write {out}: {cause}\n  try: {remedy}\n"
    assert everything(model.parent) == before


def test_what_somebody_keeps_in_the_folder_is_never_deleted(model, capsys):
    out = model.parent / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    cause = "it holds more than an earlier model: thesis.txt is there and no model.json"
    refused(model, out, capsys, cause=cause, remedy=EMPTY_IT)


def test_a_file_beside_an_earlier_model_is_never_deleted(model, capsys):
    out = models.placeholder_model(model.parent / "out")
    (out / "notes.txt").write_text("mine")
    cause = "it holds more than an earlier model: notes.txt is there, and model.json names no such file"
    refused(model, out, capsys, cause=cause, remedy=EMPTY_IT)


def test_a_model_json_of_some_other_program_is_not_an_earlier_model(model, capsys):
    out = model.parent / "out"
    out.mkdir()
    (out / "model.json").write_text("[]")
    cause = "it holds more than an earlier model: model.json is not a JSON object"
    refused(model, out, capsys, cause=cause, remedy=EMPTY_IT)


@pytest.mark.parametrize(
    ("out", "lost"), [(".", "model.tflite"), ("calibration", "calibration"), ("heldout", "heldout")]
)
def test_what_it_reads_is_never_deleted(model, capsys, out, lost):
    out = model.parent / out
    refused(model, out, capsys, cause=f"{model.parent / lost} lies there and would be deleted", remedy=ANOTHER)


def test_a_file_is_not_a_folder(model, capsys):
    out = model.parent / "out"
    out.write_text("mine")
    refused(model, out, capsys, cause="it is not a folder", remedy=ANOTHER)


def test_a_parent_that_cannot_be_made_is_said_before_any_work(model, capsys):
    (model.parent / "file").write_text("")
    refused(model, model.parent / "file" / "out", capsys, cause="Not a directory", remedy=ANOTHER)


def test_a_loop_of_links_is_refused(model, capsys):
    out = model.parent / "out"
    out.symlink_to(out)
    assert prepare(model, out) == 1
    assert capsys.readouterr().err.startswith(f"avocado-infer: cannot write {out}: ")
    assert out.is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_mount_point_keeps_the_model_it_holds(model):
    out = models.placeholder_model(model.parent / "out")
    before = everything(out)
    words = f"prepare {model} --target cpu --out {out}"
    # In a namespace of its own, so that no mount can be left behind.
    script = f"mount --bind {out} {out} && exec {sys.executable} -m inference.cli {words}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (
        1,
        f"avocado-infer: cannot write {out}: it is a mount point, which cannot be replaced\n"
        "  try: name a folder inside it with --out\n",
    )
    assert everything(out) == before


def test_a_link_leads_to_the_folder_that_is_replaced(model):
    real = models.placeholder_model(model.parent / "real")
    link = model.parent / "out"
    link.symlink_to(real)
    assert prepare(model, link) == 0
    assert link.is_symlink()
    assert models.read(real)["name"] == "model"


def test_the_folder_somebody_stands_in_is_filled(model, monkeypatch):
    out = model.parent / "out"
    out.mkdir()
    monkeypatch.chdir(out)
    assert prepare(model, ".") == 0
    assert models.read(out)["name"] == "model"


def test_an_accelerator_that_goes_with_the_earlier_model_is_named(model, capsys):
    out = models.placeholder_model(model.parent / "out")
    assert prepare(model, out) == 0
    assert capsys.readouterr().err.splitlines()[1] == f"{out}: replaces version 1, which was also for virtual"
    assert list(models.read(out)["files"]) == ["cpu"]


def test_when_the_new_model_cannot_take_its_place_the_earlier_one_is_put_back(model, monkeypatch, capsys):
    out = models.placeholder_model(model.parent / "out")
    before = everything(out)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(destination.Path, "rename", failing)
    assert prepare(model, out) == 1
    assert f"avocado-infer: cannot write {out}: No space left on device\n" in capsys.readouterr().err
    assert everything(out) == before
    assert not list(model.parent.glob(".prepare-*"))

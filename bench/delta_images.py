"""The pairs of images that the delta benchmark compares: made here, the same in every run.

Hybrid EROFS, as `avocadoctl build` makes it: lz4hc, the model stored plain. The model pairs change the bytes of a real
model between its header and its tail; the tree pairs change one source file, or the version of numpy.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
EPOCH = "1700000000"
UUID = "7488fa35-6390-425b-bbbf-b156cfe1eed2"
PACKAGES = ("aiohttp", "PIL", "tuf", "yarl", "securesystemslib", "dbus_fast")
# The same two wheels on every machine: an upgrade that changes 17 files.
NUMPY = {
    "1.26.3": "f25e2811a9c932e43943a2615e65fc487a0b6b49218899e62e426e7f0a57eeda",
    "1.26.4": "666dbfb6ec68962c033a450943ded891bed2d54e6755e35e5835d63f4f6931d5",
}


def model_bytes() -> bytes:
    """The prepared model of a fresh clone."""
    found = sorted((ROOT / "build" / "models").glob("*/cpu.tflite"))
    if not found:
        raise SystemExit("bench-delta: there is no prepared model; run: make model")
    return found[0].read_bytes()


def model_pairs(work: Path) -> Iterator[tuple[str, Path, Path]]:
    """A model and what training does to it, in three degrees."""
    base = model_bytes()
    low, high = len(base) // 40, len(base) - len(base) // 40
    variants = {"all weights shifted": bytearray(base), "one tenth": bytearray(base), "the head": bytearray(base)}
    dice = random.Random(1)  # noqa: S311 (the same in every run)
    for at in range(low, high):
        variants["all weights shifted"][at] = (base[at] + dice.choice((-2, -1, 1, 2))) % 256
        if dice.random() < 0.1:
            variants["one tenth"][at] = (base[at] + dice.choice((-1, 1))) % 256
        if at > high - (high - low) // 10:
            variants["the head"][at] = (base[at] + dice.choice((-2, -1, 1, 2))) % 256
    old = image(work, "model", {"usr/share/model/cpu.tflite": base})
    for name, data in variants.items():
        yield name, old, image(work, name.replace(" ", "-"), {"usr/share/model/cpu.tflite": bytes(data)})


def retrained_pair(work: Path) -> Iterator[tuple[str, Path, Path]]:
    """Two models that were trained apart, where somebody names them: no registry has such a pair."""
    named = os.environ.get("RETRAINED", "").split()
    if len(named) != 2:
        print("retrained: SKIPPED, no pair is named; make bench-delta RETRAINED='OLD.tflite NEW.tflite'", flush=True)
        return
    images = [
        image(work, f"retrained-{number}", {"usr/share/model/cpu.tflite": Path(path).read_bytes()})
        for number, path in enumerate(named)
    ]
    yield "retrained", images[0], images[1]


def plain_tree(work: Path) -> Path:
    """The tree of `tree_pairs` stored without compression: the image that others would ship."""
    return _tree(work, "plain", "1.26.3", edited=False, compressed=False)


def tree_pairs(work: Path) -> Iterator[tuple[str, Path, Path]]:
    """A tree of Python packages and a model; then one edited file, another numpy, and the same again."""
    old = _tree(work, "tree", "1.26.3", edited=False)
    yield "one source file edited", old, _tree(work, "edited", "1.26.3", edited=True)
    yield "numpy upgraded", old, _tree(work, "upgraded", "1.26.4", edited=False)
    yield "rebuilt unchanged", old, _tree(work, "again", "1.26.3", edited=False)


def image(work: Path, name: str, files: Mapping[str, bytes | Path], *, compressed: bool = True) -> Path:
    """A hybrid EROFS image of some files and trees, or a plain one."""
    out = work / f"{name}.img"
    hints = work / "hints"
    hints.write_text("0 \\.tflite$\n")
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        tree = Path(scratch) / "tree"
        for path, content in files.items():
            place = tree / path
            place.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                shutil.copytree(content, place, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "tests"))
            else:
                place.write_bytes(content)
        for path in [tree, *tree.rglob("*")]:
            os.utime(path, (int(EPOCH), int(EPOCH)), follow_symlinks=False)
        options = [f"-T{EPOCH}", f"-U{UUID}", "--all-root", "-x-1"]
        if compressed:
            options += ["-zlz4hc,9", f"--compress-hints={hints}"]
        subprocess.run(["mkfs.erofs", "--quiet", *options, out, tree], check=True, stdout=subprocess.DEVNULL)
    return out


def _tree(work: Path, name: str, numpy: str, *, edited: bool, compressed: bool = True) -> Path:
    site = Path(next(path for path in sys.path if path.endswith("site-packages")))
    with tempfile.TemporaryDirectory(dir=work) as scratch:
        lib = Path(scratch)
        for package in PACKAGES:
            shutil.copytree(site / package, lib / package)
        with zipfile.ZipFile(_wheel(numpy)) as wheel:
            wheel.extractall(lib)
        if edited:
            source = lib / "tuf" / "ngclient" / "updater.py"
            source.write_text(source.read_text().replace("def refresh(self)", "def refresh(self)  ", 1))
        files = {"usr/lib/app": lib, "usr/share/model/cpu.tflite": model_bytes()}
        return image(work, name, files, compressed=compressed)


def _wheel(version: str) -> Path:
    cache = Path(os.environ.get("AVOCADO_CACHE", Path.home() / ".cache" / "avocado")) / "bench"
    cache.mkdir(parents=True, exist_ok=True)
    found = sorted(cache.glob(f"numpy-{version}-cp311-*"))
    if not found:
        wanted = cache / f"numpy-{version}.txt"
        wanted.write_text(f"numpy=={version} --hash=sha256:{NUMPY[version]}\n")
        options = ["--no-deps", "--require-hashes", "--python-version", "3.11", "--only-binary", ":all:"]
        platform = ["--platform", "manylinux2014_x86_64", "--dest", cache, "-r", wanted]
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *options, *platform], check=True)
        found = sorted(cache.glob(f"numpy-{version}-cp311-*"))
    return found[0]

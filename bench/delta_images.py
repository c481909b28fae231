"""The pairs of images that the delta benchmark compares: made here, the same in every run.

Hybrid EROFS, as `avocadoctl build` makes it: lz4hc, the model stored plain. Three model pairs change the bytes of a
real model between its header and its tail, the fourth is that model and its predecessor; the tree pairs change one
source file, or the version of numpy.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from inference.prepare.download import Client, Package, read_member

Pair = tuple[Path, Path]
MakePair = Callable[[Path], Pair]

# An older version of the package that `make model` fetches: it brings the same model, trained before.
BEFORE = Package(
    Client.NPM,
    "@vladmandic/human",
    "2.1.1",
    "vladmandic-human-2.1.1.tgz",
    "b9d97882db7b17a69ca571c8ac8948fb6aa20561db9ccab37e490b0319d60723",
)
ROOT = Path(__file__).parents[1]
EPOCH = "1700000000"
UUID = "7488fa35-6390-425b-bbbf-b156cfe1eed2"
PACKAGES = ("aiohttp", "PIL", "tuf", "yarl", "securesystemslib", "dbus_fast")
# The same two wheels on every machine: an upgrade that changes 17 files.
NUMPY_BEFORE, NUMPY_AFTER = "1.26.3", "1.26.4"
NUMPY = {
    NUMPY_BEFORE: "f25e2811a9c932e43943a2615e65fc487a0b6b49218899e62e426e7f0a57eeda",
    NUMPY_AFTER: "666dbfb6ec68962c033a450943ded891bed2d54e6755e35e5835d63f4f6931d5",
}


def model_bytes() -> bytes:
    """The prepared model of a fresh clone."""
    path = ROOT / "build" / "models" / "movenet-lightning" / "cpu.tflite"
    if not path.is_file():
        raise SystemExit("bench-delta: there is no prepared model; run: make model")
    return path.read_bytes()


@functools.cache
def trained_variants() -> dict[str, bytes]:
    """The model after what training does to weights, in three degrees; its header and its tail stay."""
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
    return {name: bytes(data) for name, data in variants.items()}


def model_pair(name: str, work: Path) -> Pair:
    """The model, and one of its variants."""
    return model_image(work, "model", model_bytes()), model_image(work, name, trained_variants()[name])


def retrained_pair(work: Path) -> Pair:
    """MoveNet Lightning 3, and 4 which Google trained anew: both as `avocado-infer prepare` makes INT8 of them.

    Raises InferenceError when the older one cannot be fetched.
    """
    source, out = work / "movenet-3", work / "movenet-3-prepared"
    source.mkdir()
    for name in ("movenet-lightning.json", "movenet-lightning.bin"):
        (source / name).write_bytes(read_member(BEFORE, f"package/models/{name}"))
    prepare = [sys.executable, "-m", "inference.cli", "prepare", source / "movenet-lightning.json", "--out", out]
    options = ["--target", "virtual", "--calibration", ROOT / "build/assets/calibration"]
    subprocess.run([*prepare, *options], check=True, cwd=ROOT, capture_output=True)
    before = (out / "cpu.tflite").read_bytes()
    return model_image(work, "retrained", before), model_image(work, "model", model_bytes())


def plain_tree(work: Path) -> Path:
    """The tree of `tree_pair` stored without compression: the image that others would ship."""
    return tree(work, "plain", compressed=False)


def tree_pair(work: Path, *, numpy: str = NUMPY_BEFORE, edited: bool = False) -> Pair:
    """A tree of Python packages and a model; the same with one edited file, with another numpy, or built again."""
    return base_tree(work), tree(work, "changed", numpy, edited=edited)


@functools.cache
def base_tree(work: Path) -> Path:
    """What the trees are compared with."""
    return tree(work, "tree")


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


def model_image(work: Path, name: str, model: bytes) -> Path:
    """An image that holds one model."""
    return image(work, name.replace(" ", "-"), {"usr/share/model/cpu.tflite": model})


def tree(work: Path, name: str, numpy: str = NUMPY_BEFORE, *, edited: bool = False, compressed: bool = True) -> Path:
    """An image of some Python packages, one version of numpy among them, and a model."""
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


TREE_PAIRS: Mapping[str, MakePair] = {
    "one source file edited": functools.partial(tree_pair, edited=True),
    "numpy upgraded": functools.partial(tree_pair, numpy=NUMPY_AFTER),
    "rebuilt unchanged": tree_pair,
}
PAIRS: Mapping[str, MakePair] = {
    **{name: functools.partial(model_pair, name) for name in ("all weights shifted", "one tenth", "the head")},
    "retrained": retrained_pair,
    **TREE_PAIRS,
}

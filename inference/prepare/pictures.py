"""The pictures of the reference model: the replayed video as JPEGs, and crops of persons to calibrate and judge on.

The crops' places were found once by following both persons through the video; they are data here, so that making the
pictures needs no model. Calibration and held-out crops come from different stretches of the video, never from one
frame. `load_pictures` reads any folder of pictures the way the camera's crop would show them.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from inference.errors import InferenceError
from inference.pose import Crop
from inference.prepare.graph import Array
from inference.tensors import cut

FRAME_SIZE = (640, 360)
REPLAY_FRAMES = range(54, 198)
"""A woman walks through the picture; before, nobody is found without a crop, and after, she has left."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp")
KEPT_BYTES = 64 << 20
"""How much of pictures, and of answers to them, is kept between passes."""

# (frame, x0, y0, side) in pixels of the 640 x 360 frame.
CALIBRATION = (
    (8, 161, 28, 146), (12, 134, -8, 197), (16, 113, -34, 238), (20, 138, -1, 186), (24, 109, -12, 243),
    (28, 82, -48, 296), (32, 149, 1, 162), (36, 132, -19, 199), (40, 126, -10, 211), (44, 157, 21, 152),
    (48, 137, -12, 190), (52, 109, -38, 242), (56, 134, -6, 194), (60, 108, -13, 242), (64, 95, -41, 267),
    (60, 427, 183, 170), (65, 386, 163, 206), (70, 345, 137, 253), (75, 373, 174, 174), (80, 341, 161, 206),
    (85, 297, 133, 257), (90, 318, 172, 179), (95, 286, 153, 217), (100, 246, 134, 258), (105, 258, 170, 187),
    (110, 230, 151, 216), (115, 185, 128, 269), (120, 211, 172, 178), (125, 167, 148, 222), (130, 132, 125, 267),
)  # fmt: skip
HELD_OUT = (
    (84, 157, 27, 151), (87, 139, 2, 187), (91, 120, -27, 230), (93, 158, 7, 157), (96, 141, -6, 191),
    (99, 125, -20, 220), (102, 156, 10, 158), (106, 141, -7, 194), (108, 130, -22, 227), (111, 168, 14, 157),
    (114, 156, -1, 189), (117, 144, -21, 228), (121, 177, 5, 167), (123, 165, -8, 195), (126, 153, -25, 230),
    (129, 192, 11, 160), (132, 177, -5, 192), (135, 158, -29, 238), (138, 196, 7, 165),
    (139, 131, 164, 200), (142, 109, 149, 219), (145, 72, 122, 272), (148, 99, 160, 200), (151, 69, 141, 242),
    (154, 33, 119, 292), (157, 65, 166, 197), (160, 34, 147, 231), (163, -1, 124, 276), (166, 33, 168, 195),
    (169, 2, 147, 239), (172, -34, 125, 288), (175, -3, 172, 194), (178, -33, 152, 231), (181, -60, 130, 268),
    (184, -34, 170, 192), (187, -66, 148, 237), (190, -101, 125, 285), (193, -72, 168, 199), (196, -100, 151, 231),
)  # fmt: skip


def decode_video(video: bytes, scratch: Path) -> list[Array]:
    """Every frame of the video at FRAME_SIZE, uint8[360, 640, 3] RGB."""
    # Imported here: 60 MB that only this needs.
    import cv2

    file = scratch / "video.mp4"
    file.write_bytes(video)
    capture = cv2.VideoCapture(str(file))
    frames = []
    while True:
        more, frame = capture.read()
        if not more:
            break
        small = cv2.resize(frame, FRAME_SIZE, interpolation=cv2.INTER_AREA)
        frames.append(np.ascontiguousarray(small[..., ::-1]))
    capture.release()
    file.unlink()
    if len(frames) <= max(REPLAY_FRAMES):
        raise InferenceError(f"cannot decode the replayed video: {len(frames)} frames came out of it")
    return frames


def cut_crops(frames: Sequence[Array], places: Sequence[tuple[int, int, int, int]]) -> Iterator[tuple[str, Array]]:
    """A name and the 192 x 192 picture of each place."""
    for frame, x0, y0, side in places:
        yield f"{frame:04d}-{x0:+04d}", cut(frames[frame], Crop(x0, y0, side))


def encode(picture: Array, quality: int) -> bytes:
    """A JPEG."""
    data = io.BytesIO()
    Image.fromarray(picture).save(data, "JPEG", quality=quality, subsampling="4:2:0")
    return data.getvalue()


def repeatedly(folder: Path, side: int) -> Callable[[], Iterable[Array]]:
    """Passes over a folder's pictures: kept when they are few, read anew for every pass when they are many."""
    count = len(list_pictures(folder))
    if count * side * side * 3 > KEPT_BYTES:
        return lambda: load_pictures(folder, side)
    kept = list(load_pictures(folder, side))
    return lambda: kept


def load_pictures(folder: Path, side: int) -> Iterator[Array]:
    """Each picture of a folder in the order of names, one in memory at a time: its middle square at side x side."""
    for path in list_pictures(folder):
        frame = read_picture(path)
        height, width = frame.shape[:2]
        square = min(height, width)
        yield cut(frame, Crop((width - square) / 2, (height - square) / 2, square), side)


def read_picture(path: Path) -> Array:
    """One picture as a person sees it, uint8[height, width, 3]: upright, sixteen bits scaled to eight."""
    try:
        with warnings.catch_warnings():
            # Pillow warns from here on and refuses only what is twice as large.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as picture:
                upright = ImageOps.exif_transpose(picture)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise InferenceError(
            f"cannot read picture {path}: it has more than {Image.MAX_IMAGE_PIXELS} pixels", "make it smaller"
        ) from error
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as error:
        raise InferenceError(f"cannot read picture {path}: it is not one, or it is cut short") from error
    if upright.mode.startswith("I"):
        # convert() would clip it at 255.
        upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
    return np.asarray(upright.convert("RGB"))


def list_pictures(folder: Path) -> list[Path]:
    """The pictures of a folder; InferenceError when there are none."""
    found = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES) if folder.is_dir() else []
    if not found:
        raise InferenceError(
            f"cannot calibrate: no pictures in {folder}",
            "put 20 to 50 .jpg or .png pictures of what the camera will see there, or run `avocado-infer fetch`",
        )
    return found

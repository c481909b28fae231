"""A pose on its frame, as a JPEG.

The limbs are green when the NPU answered and amber when the CPU did, so that a takeover shows in the picture itself.
Runs beside the frame loop, and only for frames that somebody looks at.
"""

from __future__ import annotations

import io

from PIL import Image, ImageDraw

from inference.policy import Backend
from inference.pose import MIN_VISIBLE_SCORE, SKELETON
from inference.status import Sample

COLOURS = {Backend.NPU: (61, 220, 132), Backend.CPU: (255, 179, 64), Backend.NONE: (160, 160, 160)}
_OUTLINE = (12, 16, 22)


def annotate(sample: Sample, quality: int) -> bytes:
    """The sample's frame with its skeleton, encoded as JPEG."""
    picture = Image.fromarray(sample.image)
    draw = ImageDraw.Draw(picture)
    colour = COLOURS[sample.backend]
    width = max(2, round(picture.height / 140))
    points = [(float(x), float(y), float(score)) for y, x, score in sample.points]
    limbs = [
        (points[a][:2], points[b][:2]) for a, b in SKELETON if min(points[a][2], points[b][2]) >= MIN_VISIBLE_SCORE
    ]
    # A dark rim first keeps the lines readable on any background.
    for limb in limbs:
        draw.line(limb, fill=_OUTLINE, width=width + 2)
    for limb in limbs:
        draw.line(limb, fill=colour, width=width)
    for x, y, score in points:
        if score >= MIN_VISIBLE_SCORE:
            draw.circle((x, y), width, fill=(255, 255, 255), outline=colour, width=max(1, width // 2))
    data = io.BytesIO()
    picture.save(data, "JPEG", quality=quality)
    return data.getvalue()

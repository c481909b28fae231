"""The picture a model sees, and int8 codes."""

from __future__ import annotations

import numpy as np
import pytest

from inference.pose import Crop, initial_crop
from inference.tensors import cut, dequantize, quantize


def gradient(width: int = 640, height: int = 360) -> np.ndarray:
    """Red counts columns, green rows, blue is full: every pixel says where it came from."""
    frame = np.full((height, width, 3), 255, np.uint8)
    frame[..., 0] = np.arange(width)[None, :] * 255 // (width - 1)
    frame[..., 1] = np.arange(height)[:, None] * 255 // (height - 1)
    return frame


def test_a_crop_at_the_models_own_size_is_the_frames_own_pixels():
    frame = gradient()
    np.testing.assert_array_equal(cut(frame, Crop(100, 50, 192)), frame[50:242, 100:292])


def test_what_lies_outside_the_frame_is_black():
    picture = cut(gradient(), initial_crop((640, 360)))
    assert picture.shape == (192, 192, 3)
    assert not picture[:42].any()
    assert not picture[150:].any()
    assert (picture[42:150, :, 2] == 255).all()


def test_pixels_stay_where_they_were_when_the_crop_is_resized():
    frame = gradient()
    crop = Crop(-60, 40, 400)
    picture = cut(frame, crop)
    row, column = 80, 120
    x, y = crop.x0 + (column + 0.5) * 400 / 192, crop.y0 + (row + 0.5) * 400 / 192
    assert abs(int(picture[row, column, 0]) - x * 255 / 640) < 2
    assert abs(int(picture[row, column, 1]) - y * 255 / 360) < 2


@pytest.mark.parametrize("crop", [Crop(-500, 0, 192), Crop(0, 360, 192), Crop(640, 0, 0.5)])
def test_a_crop_beside_the_frame_is_all_black(crop):
    assert not cut(gradient(), crop).any()


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan"), float("inf")])
def test_a_crop_without_size_is_refused(size):
    with pytest.raises(ValueError, match="a crop needs a positive size"):
        cut(gradient(), Crop(0, 0, size))


def test_codes_round_trip_within_half_a_step_and_saturate():
    values = np.linspace(-1, 1, 101, dtype=np.float32)
    codes = quantize(values, 0.01, 3)
    assert codes.dtype == np.int8
    np.testing.assert_allclose(dequantize(codes, 0.01, 3), values, atol=0.005001)
    assert quantize(np.array([-9, 9]), 0.01, 3).tolist() == [-128, 127]


def test_tensors_without_a_scale_are_left_alone():
    values = np.ones((2, 2), np.float32)
    assert dequantize(values, 0.0, 0) is values

"""The one door to zstd: frames that need a window of the old image, and frames that need nothing.

`compression.zstd` is part of Python 3.14; before that, `backports.zstd` offers the same calls. Decompression is told
the exact length beforehand and takes only a frame that names the same: whatever window a frame asks for, libzstd then
sets aside no more than that.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ZstdError = zstd.ZstdError

_NOISE_LEVEL = 12

Parameters = Mapping[int, int]


def parameters(level: int, length: int, window: int = 0) -> dict[int, int]:
    """Compression parameters for `length` bytes after `window` bytes of the old image."""
    options: dict[int, int] = {
        zstd.CompressionParameter.compression_level: level,
        zstd.CompressionParameter.checksum_flag: 0,
        zstd.CompressionParameter.dict_id_flag: 0,
        zstd.CompressionParameter.content_size_flag: 1,
    }
    if window:
        options[zstd.CompressionParameter.window_log] = max(10, (length + window - 1).bit_length())
        options[zstd.CompressionParameter.enable_long_distance_matching] = 1
    return options


def compress(data: bytes, level: int, window: bytes = b"") -> bytes:
    """One zstd frame of `data`, which may refer back into `window`."""
    options = parameters(level, len(data), len(window))
    if not window:
        return zstd.compress(data, options=options)
    return zstd.compress(data, options=options, zstd_dict=zstd.ZstdDict(window, is_raw=True).as_prefix)


def compress_noise(data: bytes) -> bytes:
    """One zstd frame of `data` that has few repeats: the entropy coder does the work, the search is kept short."""
    options = {
        **parameters(_NOISE_LEVEL, len(data)),
        zstd.CompressionParameter.strategy: zstd.Strategy.btultra2,
        zstd.CompressionParameter.min_match: 3,
        zstd.CompressionParameter.search_log: 2,
        zstd.CompressionParameter.target_length: 32,
        zstd.CompressionParameter.hash_log: 16,
        zstd.CompressionParameter.chain_log: 16,
    }
    return zstd.compress(data, options=options)


def decompress(frame: bytes, length: int, window: bytes = b"") -> bytes:
    """The `length` bytes of exactly one frame that names its length. Raises ZstdError for any other frame."""
    named = zstd.get_frame_info(frame).decompressed_size
    if named != length:
        raise ZstdError(f"a frame of {length} bytes names {'no length' if named is None else named}")
    prefix = zstd.ZstdDict(window, is_raw=True).as_prefix if window else None
    decoder = zstd.ZstdDecompressor(zstd_dict=prefix)
    data = decoder.decompress(frame, max_length=length + 1)
    if not decoder.eof:  # there was room for one byte more, so the end was looked for
        raise ZstdError("a frame is cut short")
    if decoder.unused_data:
        raise ZstdError("bytes follow the frame")
    return data

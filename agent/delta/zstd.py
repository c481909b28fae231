"""The one door to zstd: frames that need a window of the old image, and frames that need nothing.

`compression.zstd` is part of Python 3.14; before that, `backports.zstd` offers the same calls. Decompression is told
the exact length beforehand and never makes more than one byte over it, whatever the frame claims.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

ZstdError = zstd.ZstdError

# A frame may look back over the largest window and its own segment; libzstd allocates what a frame asks for up to this.
_WINDOW_LOG_MAX = 24
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
        reach = max(10, (length + window - 1).bit_length())
        options[zstd.CompressionParameter.window_log] = min(_WINDOW_LOG_MAX, reach)
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
    """The `length` bytes of exactly one frame. Raises ZstdError for any other frame."""
    prefix = zstd.ZstdDict(window, is_raw=True).as_prefix if window else None
    decoder = zstd.ZstdDecompressor(
        zstd_dict=prefix, options={zstd.DecompressionParameter.window_log_max: _WINDOW_LOG_MAX}
    )
    data = decoder.decompress(frame, max_length=length + 1)
    if len(data) != length:
        raise ZstdError(f"a frame of {length} bytes holds {'more' if len(data) > length else len(data)}")
    # The frame's end may need one more call when the output was filled to the byte.
    if not decoder.eof and decoder.decompress(b"", max_length=1):
        raise ZstdError(f"a frame of {length} bytes holds more")
    if not decoder.eof:
        raise ZstdError("a frame is cut short")
    if decoder.unused_data:
        raise ZstdError("bytes follow the frame")
    return data

"""Where scales lie once their rows have arrived: for rows that the caller quantized, as nvfp4."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_p2p import errors

_ROWS, _COLUMNS = 128, 4  # of a tile, which lies in 512 elements one after the other


def swizzle_scales(scales: Tensor) -> Tensor:
    """Returns scale rows [..., M, P] of any type in tiles of 128 rows and 4 columns.

    As block-scaled tensor core instructions and cuBLAS read them: M and P are rounded up to whole
    tiles, with zeros; tile after tile along P, then along M; within a tile element (m, p) is at
    m % 32 * 16 + m // 32 * 4 + p. The result has the rounded shape, and is contiguous.
    """
    errors.require(scales.dim() >= 2, f"scales has {scales.dim()} dimensions, must have 2 or more")
    *lead, rows, columns = scales.shape
    tall, wide = (-(-size // tile) for size, tile in ((rows, _ROWS), (columns, _COLUMNS)))
    padded = scales.new_zeros((*lead, tall * _ROWS, wide * _COLUMNS), dtype=_raw(scales))
    padded[..., :rows, :columns] = scales.view(_raw(scales))
    tiles = padded.view(*lead, tall, 4, 32, wide, _COLUMNS)
    # [.., tall, wide, m % 32, m // 32, p]
    swizzled = tiles.movedim((-4, -3, -2), (-2, -3, -4)).contiguous()
    return swizzled.view(padded.shape).view(scales.dtype)


def _raw(scales: Tensor) -> torch.dtype:
    """A type of the same width that every operation takes."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(scales.element_size(), scales.dtype)

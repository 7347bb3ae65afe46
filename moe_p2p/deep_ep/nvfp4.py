"""nvfp4 of low-latency dispatch: the cast, and the places where DeepEP's branch hybrid-ep puts it.

A value is e2m1, two to a byte, the first in the low half. 16 of them share a scale of e4m3, which
is made for a global scale of the whole tensor: value * scale / global_scale is near x.

Symbols: T tokens, H hidden size, E_local experts of this rank, M rows of an expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_p2p.moe.scale_rows import swizzle_scales

_BLOCK = 16
_MOST, _MOST_SCALE = 6.0, 448.0  # largest e2m1, and e4m3


def quantize(x: Tensor, global_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """[T, H] -> packed values uint8 [T, H / 2] and scales float8_e4m3fn [T, H / 16]."""
    assert x.shape[1] % 32 == 0, f"hidden size {x.shape[1]} is no multiple of 32, as nvfp4 needs"
    assert global_scale is not None, "use_nvfp4 needs x_global_scale"
    factor = global_scale.float().reshape(-1, 1, 1)  # of the tensor, or of each token
    blocks = x.float().view(x.shape[0], x.shape[1] // _BLOCK, _BLOCK)
    amax = blocks.abs().amax(2, keepdim=True)
    scales = (factor * (amax / _MOST)).clamp(max=_MOST_SCALE).to(torch.float8_e4m3fn)
    by = scales.float()
    values = (blocks * (factor / by)).where(by > 0, 0.0)
    codes = _codes(values).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales.squeeze(2)


def _codes(values: Tensor) -> Tensor:
    """uint8 codes of e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, rounded to nearest, ties to even codes."""
    size = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for middle in (0.25, 1.25, 2.5, 5.0):
        code += size > middle
    for middle in (0.75, 1.75, 3.5):
        code += size >= middle
    return code | torch.signbit(values).to(torch.uint8) << 3


def tiles_for(scales: Tensor) -> Tensor:
    """Makes room for the scales [E_local, M, H / 16] in DeepEP's shape, [32, 4, M / 128, 4, H / 64,
    E_local], stored tile by tile, 128 rows each; written by fill()."""
    experts, rows, columns = scales.shape
    tall, wide = -(-rows // 128), -(-columns // 4)
    made = scales.new_empty((experts, tall, wide, 32, 4, 4))
    return made.permute(3, 4, 1, 5, 2, 0)


def fill(tiles: Tensor, scales: Tensor) -> None:
    lying = tiles.permute(5, 2, 4, 0, 1, 3)
    lying.view(torch.uint8).copy_(swizzle_scales(scales).view(torch.uint8).view(lying.shape))

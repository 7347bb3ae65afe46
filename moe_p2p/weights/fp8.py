"""fp8 in blocks of a tensor that nobody holds whole: maxima travel, elements do not.

A shard takes the maxima of the blocks it touches, shards that share blocks merge theirs, and each
quantizes what it holds: bit for bit what quantizing the gathered tensor gives. The arithmetic is in
moe_p2p/machine/fp8.py, as DeepGEMM's per_block_cast_to_fp8 has it. Scales multiply q:
weight_scale_inv of DeepSeek's checkpoints.

Shapes: x [.., N, K], a box of a parameter whose first element has index `first` there; amax and
scales [.., n, k], of the blocks that the box touches. Blocks divide the last two dimensions. x [K]
is [1, K], with amax and scales [k].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_p2p.machine import fp8

BLOCK = (128, 128)


def block_amax(x: Tensor, first: Sequence[int], block: Sequence[int] = BLOCK) -> Tensor:
    """max |x| of each block that the box touches, float32; inf where there is an inf or a NaN."""
    if x.dim() == 1:  # [1, K]
        return block_amax(x.unsqueeze(0), (0, *first), block)[0]
    n, k = (
        _touched(at, size, b) for at, size, b in zip(first[-2:], x.shape[-2:], block, strict=True)
    )
    before = [at % b for at, b in zip(first[-2:], block, strict=True)]
    after = [c * b - skip - size for c, b, skip, size in
             zip((n, k), block, before, x.shape[-2:], strict=True)]  # fmt: skip
    # 0 beside the box changes no maximum.
    padded = pad(x, (before[1], after[1], before[0], after[0]))
    cells = padded.reshape(*x.shape[:-2], n, block[0], k, block[1])
    return fp8.largest(cells, (-3, -1), keepdim=False)


def merge(maxima: Sequence[Tensor]) -> Tensor:
    """Maxima of the same blocks, of several shards."""
    return torch.stack(list(maxima)).amax(dim=0)


def scales(amax: Tensor) -> Tensor:
    """What dequantizing multiplies by, float32."""
    return fp8.factors(amax)[0]


def quantize(x: Tensor, first: Sequence[int], amax: Tensor, block: Sequence[int] = BLOCK) -> Tensor:
    """fp8 of the box, from the merged maxima of the blocks that it touches."""
    if x.dim() == 1:
        return quantize(x.unsqueeze(0), (0, *first), amax.unsqueeze(0), block)[0]
    multiplier = fp8.factors(amax)[1]
    for dim, at, size, b in zip((-2, -1), first[-2:], x.shape[-2:], block, strict=True):
        multiplier = multiplier.repeat_interleave(b, dim).narrow(dim, at % b, size)
    return fp8.to_e4m3(x.to(torch.float32) * multiplier)


def _touched(first: int, size: int, block: int) -> int:
    return -(-(first + size) // block) - first // block

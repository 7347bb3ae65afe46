"""The executable specification of fp8: values, one scale per block, and formats of scales.

Used by moe_p2p/moe/reference/routing.py, which has the calls.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

ScaleFormat = Literal["float32", "power_of_two", "ue8m0"]

SCALE_BLOCK = 128  # values that share one fp8 scale
FP8_MAX = 448.0  # largest finite float8_e4m3fn
MIN_AMAX = 1e-4  # keeps the scale of an all-zero block finite and non-zero
FP8 = torch.float8_e4m3fn


def quantize(x: Tensor, scale_format: ScaleFormat = "float32") -> tuple[Tensor, Tensor]:
    """fp8 e4m3 with one fp32 scale per 128 values of a row (the last block may be shorter).

    amax = max(|x|, 1e-4) of the block, scale = amax / 448, q = e4m3(x * (448 / amax)), rounded to
    nearest even, saturating. x is about q * scale. Formats but "float32" round the scale up to a
    power of two, and q = e4m3(x / scale).

    amax is inf where the block holds an inf or a NaN. Then scale is inf, q is NaN (0x7f) for such
    values and 0 with the sign of x for all others: q * scale is NaN in the whole block.

    Example: a block whose largest value is 2.0 has scale 0.004464, and 1.0 becomes q = 224. As a
    power of two the scale is 2^-7, and 1.0 becomes q = 128.
    """
    num_rows, hidden_dim = x.shape
    num_blocks = -(-hidden_dim // SCALE_BLOCK)
    blocks = x.new_zeros(num_rows, num_blocks * SCALE_BLOCK, dtype=torch.float32)
    blocks[:, :hidden_dim] = x
    blocks = blocks.view(num_rows, num_blocks, SCALE_BLOCK)
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp_min(MIN_AMAX)
    amax = torch.where(amax.isnan(), torch.inf, amax)
    scale, multiplier = amax / FP8_MAX, torch.full_like(amax, FP8_MAX) / amax
    if scale_format != "float32":
        mantissa, exponent = torch.frexp(scale)  # mantissa from 0.5 to below 1
        rounded = _power_of_two(exponent - (mantissa == 0.5).int())
        scale = torch.where(scale.isinf(), scale, rounded)
        multiplier = 1 / scale
    scaled = blocks * multiplier
    q = scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8)
    q.view(torch.uint8)[scaled.isnan()] = 0x7F  # without a sign
    return q.flatten(1)[:, :hidden_dim].contiguous(), scale.squeeze(-1)


def pack_ue8m0(scales: Tensor) -> Tensor:
    """int32 [..., ceil(P / 4)]: exponent bytes of powers of two [..., P], the first the lowest.

    inf becomes 255, ue8m0's NaN.
    """
    exponents = scales.contiguous().view(torch.int32) >> 23
    padded = torch.nn.functional.pad(exponents, (0, -scales.shape[-1] % 4)).to(torch.uint8)
    return padded.contiguous().view(torch.int32)


def unpack_ue8m0(packed: Tensor, num_scales: int) -> Tensor:
    """The powers of two, fp32 [..., num_scales]; 255 is NaN."""
    exponents = packed.contiguous().view(torch.uint8)[..., :num_scales].to(torch.int32)
    return torch.where(exponents == 255, torch.nan, _power_of_two(exponents - 127))


def _power_of_two(exponent: Tensor) -> Tensor:
    """2 ** exponent in fp32; torch.ldexp of integers would use torch's default type."""
    exponent = exponent.to(torch.float32)
    return torch.ldexp(torch.ones_like(exponent), exponent)


def dequantize(q: Tensor, scales: Tensor) -> Tensor:
    """fp32 [..., H] from e4m3 [..., H] and scales [..., ceil(H / 128)], or packed ue8m0."""
    if scales.dtype == torch.int32:
        scales = unpack_ue8m0(scales, -(-q.shape[-1] // SCALE_BLOCK))
    spread = scales.repeat_interleave(SCALE_BLOCK, dim=-1)[..., : q.shape[-1]]
    return q.to(torch.float32) * spread

"""The executable specification of fp8: values, one scale per block, and formats of scales.

The one place of this arithmetic in Python: moe_p2p/moe/reference/routing.py has the calls,
moe_p2p/weights/copies.py blocks of weights, moe_p2p/deep_ep/utils/math.py DeepEP's casts. Hosts and
kernels have it in kernels/abi/e4m3.h, Triton's kernels in kernels/triton/e4m3.py;
tests/package/test_e4m3.py compares them bit for bit.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

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
    blocks = in_blocks(x)
    scale, multiplier = factors(largest(blocks, -1), scale_format)
    return to_e4m3(blocks * multiplier).flatten(1)[:, : x.shape[1]].contiguous(), scale.squeeze(-1)


def in_blocks(x: Tensor) -> Tensor:
    """fp32 [T, P, 128] of x [T, H], with zeros at the end of each row."""
    num_rows, hidden_dim = x.shape
    padded = pad(x.to(torch.float32), (0, -hidden_dim % SCALE_BLOCK))
    return padded.view(num_rows, -(-hidden_dim // SCALE_BLOCK), SCALE_BLOCK)


def largest(blocks: Tensor, dim: int | tuple[int, ...], *, keepdim: bool = True) -> Tensor:
    """max |x| of blocks in these dimensions, fp32; inf where there is an inf or a NaN."""
    amax = blocks.abs().amax(dim=dim, keepdim=keepdim).to(torch.float32)
    return torch.where(amax.isnan(), torch.inf, amax)


def factors(amax: Tensor, scale_format: ScaleFormat = "float32") -> tuple[Tensor, Tensor]:
    """Scales of blocks with these maxima, and what their values are multiplied by."""
    amax = amax.clamp_min(MIN_AMAX)
    # By a tensor: on a GPU torch divides by a number as it multiplies by its reciprocal.
    most = torch.full_like(amax, FP8_MAX)
    scale = amax / most
    if scale_format == "float32":
        return scale, most / amax
    mantissa, exponent = torch.frexp(scale)  # mantissa from 0.5 to below 1
    rounded = _power_of_two(exponent - (mantissa == 0.5).int())
    scale = torch.where(scale.isinf(), scale, rounded)
    return scale, 1 / scale


def to_e4m3(scaled: Tensor) -> Tensor:
    """Rounds to nearest even, saturating; a NaN is 0x7f."""
    q = scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
    return q.where(~scaled.isnan(), 0x7F).view(FP8)  # without a sign, also where it is compiled


def pack_ue8m0(scales: Tensor) -> Tensor:
    """int32 [..., ceil(P / 4)]: exponent bytes of powers of two [..., P], the first the lowest.

    inf becomes 255, ue8m0's NaN.
    """
    exponents = scales.contiguous().view(torch.int32) >> 23
    padded = pad(exponents, (0, -scales.shape[-1] % 4)).to(torch.uint8)
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

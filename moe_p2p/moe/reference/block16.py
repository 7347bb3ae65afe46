"""The executable specification of block16: partial sums of a combine in 16 bits, a scale for 8.

Used by routing.py, which has the calls. How the bits are packed: docs/protocol.md, section 10.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 8  # values that share a scale
_CARRY, _HALF_OCTAVE = 0x5FF, 22
_FIRST, _LEAST, _LAST = 91, 64, 253  # see kernels/abi/block16.h
_TWO_THIRDS = 0x155555


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers fp32 [..., H / 8, 8] from -16382 to 16382 and scales fp32 [..., H / 8] of fp32
    [..., H].

    A scale is a power of two or 1.5 times one, from 2^-95 to 1.5 * 2^31: the smallest for which the
    block's largest integer is at most 16382. An integer is x / scale to nearest even; integer *
    scale is exact in fp32, and is rounded to itself.

    A block that holds an inf, a NaN, or a value of about 1.5 * 2^45 (5e13) or more has a NaN as its
    scale, so integer * scale is NaN in all of it.

    Example: a block whose largest value is 1.0 has scale 1.5 * 2^-14; 0.001 becomes 11 of them.
    """
    blocks = x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    most = blocks.abs().amax(-1).view(torch.int32).to(torch.int64) + _CARRY
    code = (most >> _HALF_OCTAVE) - _FIRST
    bits = code.clamp(0, _LAST) + _LEAST << _HALF_OCTAVE
    scale = bits.to(torch.int32).view(torch.float32)
    inverse = 0x7F000000 - bits - (bits >> _HALF_OCTAVE & 1) * _TWO_THIRDS
    multiplier = inverse.to(torch.int32).view(torch.float32)
    integers = (blocks.double() * multiplier.double()[..., None]).round().float()
    return integers, torch.where(code <= _LAST, scale, torch.nan)


def dequantize(integers: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., H]."""
    return (integers * scale[..., None]).flatten(-2)


def round_trip(x: Tensor) -> Tensor:
    """What arrives of fp32 [..., H]."""
    return dequantize(*quantize(x))

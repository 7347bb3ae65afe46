"""The executable specification of block16: partial sums of a combine in 16 bits, an exponent for 8.

Used by routing.py, which has the calls. How the bits are packed: docs/protocol.md, section 10.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 8  # values that share an exponent
_CARRY, _INFINITY = 0x1800, 0x7F800000
_DENORMAL_MAGIC = 4096.0  # x + it is x rounded to a multiple of 2^-11, for x from 0 to 1


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers fp32 [..., H / 8, 8] and powers of two fp32 [..., H / 8] of fp32 [..., H].

    The power is chosen so that the block's largest number lies from 64 to just under 128, and is at
    least 2^-126. A number is x / power, which is exact, rounded to nearest even: from 1 on to 12
    significant bits, below 1 to a multiple of 2^-11. x is about number * power, which fp32 holds
    exactly, and is equal to it once it was rounded so.

    A block that holds an inf, a NaN, or a value within 2^-11 of fp32's largest, has a NaN as its
    power, so number * power is NaN in all of it.

    Example: a block whose largest value is 1.0 has power 2^-6; 0.001 becomes 0.06396484375.
    """
    blocks = x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    most = blocks.abs().amax(-1).view(torch.int32).to(torch.int64) + _CARRY
    exponent = ((most >> 23) - 6).clamp(1, 248)
    power = (exponent << 23).to(torch.int32).view(torch.float32)
    inverse = (254 - exponent << 23).to(torch.int32).view(torch.float32)
    multiplied = blocks * inverse[..., None]
    magnitude = multiplied.abs()
    bits = magnitude.view(torch.int32)
    normal = (bits + 0x7FF + (bits >> 12 & 1) & ~0xFFF).view(torch.float32)
    number = torch.where(magnitude < 1, magnitude + _DENORMAL_MAGIC - _DENORMAL_MAGIC, normal)
    power = torch.where(most < _INFINITY, power, torch.nan)
    return number.copysign(multiplied), power


def dequantize(number: Tensor, power: Tensor) -> Tensor:
    """fp32 [..., H]."""
    return (number * power[..., None]).flatten(-2)


def round_trip(x: Tensor) -> Tensor:
    """What arrives of fp32 [..., H]."""
    return dequantize(*quantize(x))

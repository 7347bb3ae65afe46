"""The executable specification of int10: partial sums of a combine as 10-bit integers.

Used by routing.py, which has the calls. How the integers are packed: docs/protocol.md, section 10.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32  # values that share a scale
MOST = 511  # largest integer; -511 the smallest
LEAST_SCALE = 2.0**-126
UNIT, UNIT_BYTES = 256, 336  # values and bytes of a unit: a row is whole units


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers int32 [..., H / 32, 32] and bfloat16 scales [..., H / 32] of fp32 [..., H].

    scale = max(|x|) * (1 / 511) of the block, rounded up to a bfloat16 and at least 2^-126;
    q = round(x * (1 / scale)), to nearest even, each step in fp32. x is about q * scale, which fp32
    holds exactly.

    A block that holds an inf or a NaN has a NaN as its scale, so q * scale is NaN in all of it.

    Example: a block whose largest value is 2.0 has scale 0.00393677, and 1.0 becomes q = 254.
    """
    blocks = x.to(torch.float32).reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    most = blocks.abs().amax(-1)
    step = torch.tensor(1.0, dtype=torch.float32, device="cpu") / MOST
    bits = (most * step).view(torch.int32)
    scale = ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32).clamp_min(LEAST_SCALE)
    scale = torch.where(most.isfinite(), scale, torch.nan)
    q = (blocks * (1.0 / scale)[..., None]).round()
    q = torch.where(q.isfinite(), q, 0.0).to(torch.int32)
    return q, scale.to(torch.bfloat16)


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """fp32 [..., H]."""
    return (q.to(torch.float32) * scale.to(torch.float32)[..., None]).flatten(-2)


def round_trip(x: Tensor) -> Tensor:
    """What arrives of fp32 [..., H]."""
    return dequantize(*quantize(x))


def row_bytes(hidden_dim: int) -> int:
    """Bytes of a row as it travels."""
    return -(-hidden_dim // UNIT) * UNIT_BYTES

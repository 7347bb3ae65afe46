"""Every bf16 value in blocks of fp8 with a given maximum: what all quantizers are compared on."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCKS = -(-65536 // 127)  # of one maximum
# As fp32, and rounded to bf16: the least amax and its neighbours, powers of two that are scales and
# their neighbours, numbers whose quotients need rounding, the largest, inf and NaN.
MAXIMA = [1e-4, 1.0014e-4, 9.9e-5, 448.0, 450.0, 446.0, 1.75, 0.875, 3.5, 3.0, 1.0, 0.7, 1e-38,
          5.3, 2.0**-126, 2.0**-8, 6.1e4, 3.3e38, float("inf"), float("nan")]  # fmt: skip


def every_value(maximum: float) -> Tensor:
    """bf16 [BLOCKS, 128]: the maximum first in each block, then all values; larger ones are 0."""
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device="cpu").view(torch.bfloat16)
    most = torch.tensor(maximum, dtype=torch.bfloat16, device="cpu")
    zero = values.new_zeros(())
    if most.isfinite():
        values = torch.where(values.abs() <= most, values, zero)
    padded = torch.cat([values, zero.expand(BLOCKS * 127 - len(values))])
    return torch.cat([most.expand(BLOCKS, 1), padded.view(BLOCKS, 127)], dim=1)

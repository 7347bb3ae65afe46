"""The gradient of the weight that a row is multiplied with."""

from __future__ import annotations

import torch
from torch import Tensor

_VALUES_AT_ONCE = 1 << 24  # 64 MiB of fp32 that a backward multiplies at a time


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """fp32 [R], the sum of a * b over each row of [R, H].

    Eager torch keeps every product, in fp32: with a few rows at a time, that is little memory. A
    compiler makes one kernel of it that keeps none.
    """
    rows = a.shape[0]
    compiles = torch.compiler.is_compiling() or not isinstance(rows, int)
    if compiles or torch.is_grad_enabled():
        return (a.float() * b.float()).sum(-1)
    dots = a.new_empty(rows, dtype=torch.float32)
    at_once = max(1, _VALUES_AT_ONCE // max(1, a.shape[1]))
    pairs = zip(torch.split(a, at_once), torch.split(b, at_once), strict=True)
    for out, (x, y) in zip(torch.split(dots, at_once), pairs, strict=True):
        torch.sum(x.float() * y, -1, out=out)
    return dots

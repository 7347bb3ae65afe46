"""deep_ep.utils.math: numbers and casts in plain torch, on any device.

Symbols: T tokens, H hidden size, P = ceil(H / 128) blocks, each of which shares a scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe_p2p.machine import fp8


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def align(x: int, y: int) -> int:
    """Returns the least multiple of y that is not below x."""
    return ceil_div(x, y) * y


def safe_div(a: float, b: float) -> float:
    """a / b; 0 / 0 is 0."""
    return 0.0 if a == 0 and b == 0 else a / b


def calc_diff(x: Tensor, y: Tensor) -> float:
    """Returns 0 for equal tensors, towards 1 the less alike they are: 1 - 2xy / (xx + yy) of x + 1
    and y + 1."""
    x, y = x.double().add(1).flatten(), y.double().add(1).flatten()
    return float(1 - 2 * x.dot(y) / (x.dot(x) + y.dot(y)))


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, H] -> float8_e4m3fn [T, H] and float32 scales [T, P], which give x when multiplied."""
    return fp8.quantize(x)


def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    """The inverse: bfloat16 [T, H]. Scales: float32 [T, P], or int32 with four exponents each."""
    num_tokens, hidden = x_fp8.shape
    if num_tokens == 0:
        return x_fp8.to(torch.bfloat16)
    if x_scales.dtype == torch.int32:
        exponents = x_scales.contiguous().view(torch.uint8).to(torch.int32)
        x_scales = (exponents << 23).view(torch.float32)
    blocks = fp8.in_blocks(x_fp8)
    scales = x_scales.reshape(num_tokens, -1)[:, : blocks.shape[1], None]
    return (blocks * scales).flatten(1)[:, :hidden].to(torch.bfloat16).contiguous()


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Each row of x [T, K] becomes its distinct numbers from 0 to num_slots - 1, largest first, and
    -1 in what is left."""
    named = torch.zeros((x.shape[0], num_slots + 1), dtype=torch.bool, device=x.device)
    named.scatter_(1, x.where(x >= 0, num_slots).long(), True)
    numbers = torch.arange(num_slots, dtype=x.dtype, device=x.device)
    distinct = numbers.where(named[:, :num_slots], -1).sort(dim=1, descending=True).values
    kept = min(num_slots, x.shape[1])
    x.fill_(-1)
    x[:, :kept] = distinct[:, :kept]


def create_grouped_scores(scores: Tensor, group_idx: Tensor, num_groups: int) -> Tensor:
    """scores [T, E] with zeros for experts whose group is not in group_idx [T, G]."""
    num_tokens, num_experts = scores.shape
    chosen = torch.zeros((num_tokens, num_groups), dtype=torch.bool, device=scores.device)
    chosen.scatter_(1, group_idx, True)
    return scores * chosen.repeat_interleave(num_experts // num_groups, dim=1)


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, (tuple, list)):
        for part in given:
            yield from _tensors(part)
    elif given is not None:
        yield given


def hash_tensor(t: Tensor) -> int:
    """The sum of its bytes as int32."""
    return int(t.view(torch.int32).sum())


def hash_tensors(*tensors: Any) -> int:
    """All hashes, exclusive-or'ed; tuples and lists are taken apart."""
    value = 0
    for tensor in _tensors(tensors):
        value ^= hash_tensor(tensor)
    return value


def count_bytes(*tensors: Any) -> int:
    """Bytes of all tensors; tuples and lists are taken apart, None is nothing."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(tensors))

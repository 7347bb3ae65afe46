"""Mixture-of-experts layers as in engines: inputs, experts, and expected results.

Every expert has a function of its own, and the numbers of tokens change with each step; ranks are
processes with a gloo group. Used by test_vllm.py, test_sglang.py and test_megatron.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_p2p.moe import reference
from moe_p2p.tools import launch
from tests.support.ranks import Rank

WORLD, EXPERTS, HIDDEN, TOPK, TOKENS = 3, 12, 256, 3, 20
COUNTS = ([20, 0, 7, 11], [1, 13, 20, 0], [0, 0, 1, 0])  # tokens of each rank, step by step
# Three roundings to bf16 (row, partial sum, sum), each 2^-9 of a value, and sums that cancel.
BF16 = {"rtol": 2e-2, "atol": 2e-2}
FP32 = {"rtol": 1e-5, "atol": 1e-5}  # sums in another order


@dataclass(frozen=True)
class Shape:
    max_num_tokens: int = TOKENS
    hidden_dim: int = HIDDEN
    num_experts: int = EXPERTS
    experts_per_token: int = TOPK


def inputs(
    rank: int, step: int, dtype: torch.dtype, *, topk: int = TOPK, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], ids [T, K] and weights [T, K] of one rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    host: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    num_tokens = COUNTS[step][rank]
    x = torch.randn(num_tokens, HIDDEN, **host).to(dtype)
    scores = torch.rand(num_tokens, EXPERTS, **host)
    weights, ids = scores.topk(topk, dim=-1)
    return x.to(device), ids.to(device), weights.to(device)


def expert(x: Tensor, ids: Tensor) -> Tensor:
    """The experts' functions: x [..., H], expert of each row [...]."""
    e = ids[..., None].float() / EXPERTS
    return x.float() * (0.5 + e) + (e - 0.25)


def plain(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """One process's MoE, fp32."""
    return (expert(x[:, None].expand(-1, ids.shape[1], -1), ids) * weights[..., None]).sum(dim=1)


def as_sent(x: Tensor) -> Tensor:
    """x as the experts receive it after a block-wise quantized dispatch."""
    return reference.dequantize(*reference.quantize(x))


def join(rank: Rank, device: str) -> Any:
    if device == "cuda":
        torch.cuda.set_device(launch.gpu_of(rank.rank))
    dist.init_process_group("gloo", store=rank.store, rank=rank.rank, world_size=rank.world_size)
    return dist.group.WORLD


def first_expert(rank: Rank) -> int:
    return rank.rank * EXPERTS // rank.world_size


def wide(rows: Tensor, scales: Tensor | None) -> Tensor:
    """Dequantizes rows to fp32; one scale per block of 128 values, or per row."""
    if scales is None:
        return rows.float()
    return (rows.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)

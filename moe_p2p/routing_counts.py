"""Counts, on the device, how many tokens of a routing go to each rank, node and expert.

Symbols: T tokens, K top-k, E experts in equal blocks, W ranks, L ranks per node.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor

from moe_p2p import errors


class RoutingCounts(NamedTuple):
    """Counts of one rank's tokens. They lie in one block of memory, in this order."""

    num_tokens_per_rank: Tensor  # [W] int32
    num_tokens_per_node: Tensor | None  # [W / L] int32; None: not requested
    num_tokens_per_expert: Tensor  # [E] int32
    is_token_in_rank: Tensor  # [T, W] bool


def count_routing(
    topk_idx: Tensor, num_experts: int, num_ranks: int, *, num_nodes: int = 0
) -> RoutingCounts:
    """Counts topk_idx [T, K], int32 or int64. Entries outside 0..E-1, such as -1, are not counted.

    num_nodes: counts nodes too, of W / num_nodes ranks each; 0: does not. Raises
    InvalidArgumentError unless num_experts is a multiple of num_ranks.
    """
    errors.require(
        num_experts % num_ranks == 0,
        f"num_experts is {num_experts}, must be a multiple of the number of ranks {num_ranks}",
    )
    counts = torch.zeros(
        num_ranks + num_nodes + num_experts, dtype=torch.int32, device=topk_idx.device
    )
    per_rank, per_node, per_expert = torch.split(counts, [num_ranks, num_nodes, num_experts])
    in_rank = torch.empty((topk_idx.shape[0], num_ranks), dtype=torch.bool, device=topk_idx.device)
    count = _count_in_triton if topk_idx.is_cuda and _has_triton() else _count_in_torch
    count(topk_idx, per_rank, per_node, per_expert, in_rank)
    return RoutingCounts(per_rank, per_node if num_nodes else None, per_expert, in_rank)


def _count_in_torch(
    topk_idx: Tensor, per_rank: Tensor, per_node: Tensor, per_expert: Tensor, in_rank: Tensor
) -> None:
    num_experts, num_ranks = per_expert.shape[0], per_rank.shape[0]
    idx = topk_idx.long()
    idx = torch.where((idx >= 0) & (idx < num_experts), idx, -1)  # [T, K]
    one = torch.ones((), dtype=torch.int32, device=idx.device)
    # Index 0 takes entries that name no expert.
    experts = torch.zeros(num_experts + 1, dtype=torch.int32, device=idx.device)
    experts.scatter_add_(0, (idx + 1).flatten(), one.expand(idx.numel()))
    per_expert.copy_(experts[1:])
    ranks = torch.zeros((idx.shape[0], num_ranks + 1), dtype=torch.bool, device=idx.device)
    ranks.scatter_(1, idx.div(num_experts // num_ranks, rounding_mode="floor") + 1, True)
    in_rank.copy_(ranks[:, 1:])
    per_rank.copy_(in_rank.sum(0))
    if num_nodes := per_node.shape[0]:
        nodes = in_rank.view(-1, num_nodes, num_ranks // num_nodes)
        per_node.copy_(nodes.any(2).sum(0))


def _count_in_triton(
    topk_idx: Tensor, per_rank: Tensor, per_node: Tensor, per_expert: Tensor, in_rank: Tensor
) -> None:
    from moe_p2p.kernels.triton.routing import count_routing

    count_routing(topk_idx.contiguous(), per_rank, per_node, per_expert, in_rank)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None

"""Counts a routing's tokens for each rank, node and expert in Triton, in one launch.

Importing this needs Triton; `import moe_p2p` does not.

Symbols: T tokens, K top-k, E experts in equal blocks, W ranks, N nodes of W / N ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_TOKENS = 64


# One compilation for all batches: otherwise T = 1 and multiples of 16 would get kernels of their
# own, and one could be compiled first while a graph is captured.
@triton.jit(do_not_specialize=["num_tokens"])
def _count_kernel(
    topk_idx_ptr,
    per_rank_ptr,
    per_node_ptr,
    per_expert_ptr,
    in_rank_ptr,
    num_tokens,
    num_experts,
    num_ranks,
    ranks_per_node,
    TOPK: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Counts TOKENS tokens; COLUMNS is at least TOPK.

    Example: of 4 experts on 2 ranks, the token [0, 1] adds 1 to experts 0 and 1 and to rank 0.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, COLUMNS)
    inside = (token < num_tokens)[:, None] & (column < TOPK)[None, :]
    idx = tl.load(topk_idx_ptr + token[:, None] * TOPK + column[None, :], mask=inside, other=-1)
    named = (idx >= 0) & (idx < num_experts)
    tl.atomic_add(per_expert_ptr + idx, 1, mask=named, sem="relaxed")
    rank = tl.where(named, idx // (num_experts // num_ranks), -1)
    in_node = tl.zeros((TOKENS,), tl.int32)
    for r in range(num_ranks):
        in_rank = tl.max((rank == r).to(tl.int32), axis=1)
        tl.store(in_rank_ptr + token * num_ranks + r, in_rank, mask=token < num_tokens)
        tl.atomic_add(per_rank_ptr + r, tl.sum(in_rank, axis=0), sem="relaxed")
        if ranks_per_node > 0:
            in_node = tl.maximum(in_node, in_rank)
            if r % ranks_per_node == ranks_per_node - 1:
                node = r // ranks_per_node
                tl.atomic_add(per_node_ptr + node, tl.sum(in_node, axis=0), sem="relaxed")
                in_node = tl.zeros((TOKENS,), tl.int32)


def count_routing(
    topk_idx: Tensor, per_rank: Tensor, per_node: Tensor, per_expert: Tensor, in_rank: Tensor
) -> None:
    """Adds to per_rank [W], per_node [N] (N may be 0) and per_expert [E], all int32; writes in_rank
    [T, W] bool. topk_idx: [T, K] int32 or int64, contiguous; -1: none.
    """
    num_tokens, topk = topk_idx.shape
    num_ranks, num_nodes = per_rank.shape[0], per_node.shape[0]
    if num_tokens == 0:
        return
    _count_kernel[(triton.cdiv(num_tokens, _BLOCK_TOKENS),)](
        topk_idx,
        per_rank,
        per_node,
        per_expert,
        in_rank.view(torch.uint8),
        num_tokens,
        per_expert.shape[0],
        num_ranks,
        num_ranks // num_nodes if num_nodes else 0,
        TOPK=topk,
        COLUMNS=triton.next_power_of_2(topk),
        TOKENS=_BLOCK_TOKENS,
    )

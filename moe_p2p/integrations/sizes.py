"""How many rows a call will bring to this rank, known on the host before it is made.

Engines that take rows of all experts one after the other want exactly as many rows as come. The
ranks tell each other how many tokens they have for every expert; it costs one wait for the GPU.

Symbols: T tokens, K top-k, E experts, E_local of this rank, W ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_p2p.all_to_all import AllToAll
from moe_p2p.layer import local_experts


class Sizes(NamedTuple):
    max_tokens: int  # of any rank in this call, at least 1
    capacity: int  # rows that come to this rank, each expert's rounded up to the alignment
    counts: Tensor  # [E_local] int32 on the CPU: rows of each expert, rounded up


def capturing(x: Tensor) -> bool:
    """Whether calls on x become part of a CUDA graph, so that the host cannot know their sizes."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def exchange_sizes(all_to_all: AllToAll, topk_idx: Tensor, *, alignment: int = 1) -> Sizes:
    """Sizes of the next dispatch. All ranks call it, each with the topk_idx [T, K] it will give."""
    mine = _counts(topk_idx, all_to_all.config.num_experts)
    everyone = all_to_all.gather_counts(mine)  # [W, E + 1]
    counts = everyone[:, :-1].sum(dim=0)[local_experts(all_to_all)]
    rounded = (counts + alignment - 1) // alignment * alignment
    max_tokens = max(1, int(everyone[:, -1].max()))
    return Sizes(max_tokens, int(rounded.sum()), rounded.to(torch.int32))


def _counts(topk_idx: Tensor, num_experts: int) -> Tensor:
    """[E + 1] int32 on the CPU: tokens for each expert, and T. Entries of -1 count nowhere."""
    flat = topk_idx.flatten().to(torch.int64)
    # One place more, for -1. Not bincount: on a GPU it waits once more, for the largest value.
    counts = flat.new_zeros(num_experts + 1).index_add_(
        0, torch.where(flat < 0, num_experts, flat), torch.ones_like(flat)
    )
    counts[num_experts] = topk_idx.shape[0]
    if counts.is_cuda:
        # A copy to pageable memory behind a kernel that waits can keep proxies from the driver.
        torch.cuda.current_stream().synchronize()
    return counts.to(device="cpu", dtype=torch.int32)

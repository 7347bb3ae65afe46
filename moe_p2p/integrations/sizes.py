"""How many rows a call will bring to this rank, known on the host before it is made.

Engines that take rows of all experts one after the other want exactly as many rows as come. The
ranks tell each other how many tokens they have for every expert; the host waits for the GPU once.

Symbols: T tokens, K top-k, E_local experts of this rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_p2p.all_to_all import AllToAll
from moe_p2p.deep_ep.host_counts import HostCounts, agree_on_extent
from moe_p2p.deep_ep.layout import count_routing


class Sizes(NamedTuple):
    max_tokens: int  # of any rank in this call, at least 1
    capacity: int  # rows that come to this rank, each expert's rounded up to the alignment
    counts: Tensor  # [E_local] int32 on the CPU: rows of each expert, rounded up


class SizeExchange:
    """Asks the ranks of one AllToAll, or of several, one call at a time."""

    def __init__(self) -> None:
        self._host_counts = HostCounts()

    def ask(self, all_to_all: AllToAll, topk_idx: Tensor, *, alignment: int = 1) -> Sizes:
        """Sizes of the next dispatch. All ranks call it, each with the topk_idx [T, K] of his."""
        routing = count_routing(topk_idx, all_to_all.config.num_experts, all_to_all.world_size)
        mine = self._host_counts.read(
            routing.num_tokens_per_rank, routing.num_tokens_per_expert, topk_idx.shape[0]
        )
        extent = agree_on_extent(all_to_all, mine, alignment)
        counts = torch.tensor(extent.counts, dtype=torch.int32, device="cpu")
        return Sizes(extent.max_tokens, sum(extent.counts), counts)


def capturing(x: Tensor) -> bool:
    """Whether calls on x become part of a CUDA graph, so that the host cannot know their sizes."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()

"""Counts that the host must know before it can allocate: of this rank's device, and of all ranks.

A device's counts are copied behind the work that makes them, and the host waits for that copy
alone; the other ranks' counts come from host to host. Engines that take the rows of all experts one
after the other want exactly as many rows as arrive: SizeExchange.

Symbols: W ranks, E experts, E_local of this rank, T tokens of a rank, K top-k, R rows received.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.all_to_all import AllToAll
from moe_p2p.routing_counts import count_routing

_CAPTURED = (
    "counts for the host cannot be had while a graph is captured: pass num_worst_tokens (V1) or "
    "do_cpu_sync=False (V2), or a handle of an earlier dispatch"
)


class HostCounts:
    """Reads counts of one rank's device; one call at a time."""

    def __init__(self) -> None:
        self._pinned = torch.empty(0, dtype=torch.int32, device="cpu")

    def read(self, per_rank: Tensor, per_expert: Tensor, num_tokens: int) -> Tensor:
        """[W + E + 1] int32 on the host: both, then the number. Good until the next call.

        Runs on the current stream.
        """
        if not per_rank.is_cuda:
            number = torch.tensor([num_tokens], dtype=torch.int32, device="cpu")
            return torch.cat((per_rank, per_expert, number))
        errors.require(not torch.cuda.is_current_stream_capturing(), _CAPTURED)
        num_ranks, end = per_rank.shape[0], per_rank.shape[0] + per_expert.shape[0]
        if self._pinned.shape[0] != end + 1:
            with torch.inference_mode(False):  # later calls, in any mode, write to it
                self._pinned = torch.empty(
                    end + 1, dtype=torch.int32, device="cpu", pin_memory=True
                )
        together = self._pinned
        together[:num_ranks].copy_(per_rank, non_blocking=True)
        together[num_ranks:end].copy_(per_expert, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        together[end] = num_tokens
        copied.synchronize()
        return together


class Extent(NamedTuple):
    """How much a dispatch with one row for each (token, rank) moves."""

    num_rows: int  # R
    max_tokens: int  # T of any rank, or a bound
    counts: list[int]  # tokens of each local expert, rounded up; empty where nobody counted
    gathered: Tensor | None  # [W, W + ..] int32, on the host: rows of rank j from each rank i

    @property
    def prefix(self) -> Tensor | None:
        """[W, W] int32, on the host: rows of rank j from ranks 0 to i."""
        if self.gathered is None:
            return None
        return self.gathered[:, : self.gathered.shape[0]].cumsum(0, dtype=torch.int32)


def agree_on_extent(all_to_all: AllToAll, counts: Tensor, alignment: int) -> Extent:
    """Exact, from what all ranks count; all ranks call this.

    counts: what HostCounts has read of this rank's tokens, whose experts lie in equal blocks.
    """
    errors.require(
        all_to_all.config.expert_rank is None,
        "sizes are worked out for experts in equal blocks, but the configuration has expert_rank: "
        "count rows of each rank's experts yourself and share them by gather_counts",
    )
    gathered = all_to_all.gather_counts(counts)  # [W, W + E + 1]
    # A GPU waits for what follows: few operations, and lists instead of small tensors.
    totals = gathered.sum(0, dtype=torch.int32).tolist()
    max_tokens = max(1, *gathered.select(1, -1).tolist())
    first = all_to_all.world_size + all_to_all.rank * all_to_all.num_local_experts
    per_expert = totals[first : first + all_to_all.num_local_experts]
    if alignment > 1:
        per_expert = [-(-count // alignment) * alignment for count in per_expert]
    return Extent(totals[all_to_all.rank], max_tokens, per_expert, gathered)


def worst_extent(num_worst_tokens: int, num_tokens: int, world_size: int) -> Extent:
    """From what all ranks give alike, without asking them."""
    max_tokens = -(-num_worst_tokens // world_size)
    errors.require(
        num_tokens <= max_tokens,
        f"x has {num_tokens} tokens; with num_worst_tokens {num_worst_tokens} each of the "
        f"{world_size} ranks may bring {max_tokens}: pass the largest number of tokens of any "
        "rank times the number of ranks",
    )
    return Extent(num_worst_tokens, max_tokens, [], None)


def to_device(counts: Tensor, like: Tensor) -> Tensor:
    """Counts of the host where `like` lies, on the current stream; the host waits for nothing."""
    return counts.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else counts


class Sizes(NamedTuple):
    max_tokens: int  # of any rank in this call, at least 1
    capacity: int  # rows that come to this rank, each expert's rounded up to the alignment
    counts: Tensor  # [E_local] int32 on the CPU: rows of each expert, rounded up


class SizeExchange:
    """Asks the ranks of one AllToAll, or of several, one call at a time."""

    def __init__(self) -> None:
        self._host_counts = HostCounts()

    def ask(self, all_to_all: AllToAll, topk_idx: Tensor, *, alignment: int = 1) -> Sizes:
        """Sizes of the next dispatch. All ranks call it, each with its own topk_idx [T, K]."""
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

"""Counts that the host needs before it can allocate: from this rank's device, and from all ranks.

The device's counts are copied on the stream that computes them, and the host waits only for that
copy; the other ranks' counts arrive from host to host. SizeExchange serves engines that lay out the
rows of all experts without gaps and allocate exactly the rows that arrive.

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
    """Reads counts from one rank's device. Not reentrant: one call at a time."""

    def __init__(self) -> None:
        self._pinned = torch.empty(0, dtype=torch.int32, device="cpu")

    def read(self, per_rank: Tensor, per_expert: Tensor, num_tokens: int) -> Tensor:
        """Returns [W + E + 1] int32 on the host: per_rank, per_expert, num_tokens.

        Valid until the next call. Runs on the current stream, and waits for it. Raises
        InvalidArgumentError while a graph is captured.
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
    """Sizes of a dispatch with one row per (token, rank)."""

    num_rows: int  # R
    max_tokens: int  # largest T of any rank, or a bound
    counts: list[int]  # tokens of each local expert, rounded up; empty if not counted
    gathered: Tensor | None  # [W, W + ..] int32, on the host: [i, j] rows from rank i to rank j

    @property
    def prefix(self) -> Tensor | None:
        """[W, W] int32, on the host: [i, j] rows of rank j from ranks 0 to i."""
        if self.gathered is None:
            return None
        return self.gathered[:, : self.gathered.shape[0]].cumsum(0, dtype=torch.int32)


def agree_on_extent(all_to_all: AllToAll, counts: Tensor, alignment: int) -> Extent:
    """Returns exact sizes from the counts of all ranks. Collective.

    counts: HostCounts.read() of this rank's tokens. Raises InvalidArgumentError unless experts are
    in equal blocks.
    """
    errors.require(
        all_to_all.config.expert_rank is None,
        "sizes are worked out for experts in equal blocks, but the configuration has expert_rank: "
        "count rows of each rank's experts yourself and share them by gather_counts",
    )
    gathered = all_to_all.gather_counts(counts)  # [W, W + E + 1]
    # The GPU idles during what follows: few operations, and lists instead of small tensors.
    totals = gathered.sum(0, dtype=torch.int32).tolist()
    max_tokens = max(1, *gathered.select(1, -1).tolist())
    first = all_to_all.world_size + all_to_all.rank * all_to_all.num_local_experts
    per_expert = totals[first : first + all_to_all.num_local_experts]
    if alignment > 1:
        per_expert = [-(-count // alignment) * alignment for count in per_expert]
    return Extent(totals[all_to_all.rank], max_tokens, per_expert, gathered)


def worst_extent(num_worst_tokens: int, num_tokens: int, world_size: int) -> Extent:
    """Returns upper bounds from num_worst_tokens, which is equal on all ranks; no exchange."""
    max_tokens = -(-num_worst_tokens // world_size)
    errors.require(
        num_tokens <= max_tokens,
        f"x has {num_tokens} tokens; with num_worst_tokens {num_worst_tokens} each of the "
        f"{world_size} ranks may bring {max_tokens}: pass the largest number of tokens of any "
        "rank times the number of ranks",
    )
    return Extent(num_worst_tokens, max_tokens, [], None)


def to_device(counts: Tensor, like: Tensor) -> Tensor:
    """Copies host counts to the device of `like` on the current stream, without waiting."""
    return counts.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else counts


class Sizes(NamedTuple):
    max_tokens: int  # most tokens of any rank in this call, at least 1
    capacity: int  # rows that arrive at this rank, each expert's rounded up to the alignment
    counts: Tensor  # [E_local] int32 on the CPU: rows of each expert, rounded up


class SizeExchange:
    """Exchanges sizes among the ranks of an AllToAll, or of several, one call at a time."""

    def __init__(self) -> None:
        self._host_counts = HostCounts()

    def ask(self, all_to_all: AllToAll, topk_idx: Tensor, *, alignment: int = 1) -> Sizes:
        """Returns the next dispatch's sizes. Collective; each rank passes its topk_idx [T, K]."""
        routing = count_routing(topk_idx, all_to_all.config.num_experts, all_to_all.world_size)
        mine = self._host_counts.read(
            routing.num_tokens_per_rank, routing.num_tokens_per_expert, topk_idx.shape[0]
        )
        extent = agree_on_extent(all_to_all, mine, alignment)
        counts = torch.tensor(extent.counts, dtype=torch.int32, device="cpu")
        return Sizes(extent.max_tokens, sum(extent.counts), counts)


def capturing(x: Tensor) -> bool:
    """Whether calls on x are being captured in a CUDA graph: then the host cannot know sizes."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()

"""Counts that the host must know before it can allocate: of this rank's device, and of all ranks.

A device's counts are copied behind the work that makes them, and the host waits for that copy
alone; the other ranks' counts come from host to host.

Symbols: W ranks, E experts, T tokens of a rank, R rows received.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.all_to_all import AllToAll

_CAPTURED = (
    "counts for the host cannot be had while a graph is captured: pass num_worst_tokens (V1) or "
    "do_cpu_sync=False (V2), or a handle of an earlier dispatch"
)


class HostCounts:
    """Reads counts of one rank's device; one call at a time."""

    def __init__(self) -> None:
        self._pinned = torch.empty(0, dtype=torch.int32)

    def read(self, *counts: Tensor) -> Tensor:
        """int32 tensors, one after the other, on the host. The result is good until the next call.

        Runs on the current stream.
        """
        if not counts[0].is_cuda:
            return torch.cat(counts)
        errors.require(not torch.cuda.is_current_stream_capturing(), _CAPTURED)
        sizes = [count.numel() for count in counts]
        if self._pinned.numel() < sum(sizes):
            self._pinned = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=True)
        together = self._pinned[: sum(sizes)]
        for part, count in zip(torch.split(together, sizes), counts, strict=True):
            part.copy_(count, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        copied.synchronize()
        return together


class Extent(NamedTuple):
    """How much a dispatch with one row for each (token, rank) moves."""

    num_rows: int  # R
    max_tokens: int  # T of any rank, or a bound
    counts: list[int]  # tokens of each local expert, rounded up; empty where nobody counted
    prefix: Tensor | None  # [W, W] int32, on the host: rows of rank j from ranks 0 to i


def agree_on_extent(
    all_to_all: AllToAll, counts: Tensor, num_tokens: int, alignment: int
) -> Extent:
    """Exact, from what all ranks count; all ranks call this.

    counts: [W + E] int32 on the host: of this rank's tokens, for each rank and each expert.
    """
    world_size, experts = all_to_all.world_size, all_to_all.num_local_experts
    mine = torch.cat((counts, torch.tensor([num_tokens], dtype=torch.int32)))
    gathered = all_to_all.gather_counts(mine)  # [W, W + E + 1]
    prefix = gathered[:, :world_size].cumsum(0, dtype=torch.int32)
    first = world_size + all_to_all.rank * experts
    per_expert = gathered[:, first : first + experts].sum(0).tolist()
    return Extent(
        num_rows=int(prefix[-1, all_to_all.rank]),
        max_tokens=max(1, int(gathered[:, -1].max())),
        counts=[-(-count // alignment) * alignment for count in per_expert],
        prefix=prefix,
    )


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

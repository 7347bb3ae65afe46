"""Counts that the host needs before it can allocate: from this rank's device, and from all ranks.

A kernel stores the device's counts in pinned memory as soon as it knows them, and the host looks
there without waiting for the stream; the other ranks' counts arrive from host to host. SizeExchange
serves engines that lay out the rows of all experts without gaps and allocate exactly the rows that
arrive.

Symbols: W ranks, E experts, E_local of this rank, T tokens of a rank, K top-k, R rows received.
"""

from __future__ import annotations

import collections
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_p2p import errors
from moe_p2p.library import call
from moe_p2p.moe.all_to_all import AllToAll
from moe_p2p.moe.dispatched import new_tuple
from moe_p2p.moe.routing_counts import RoutingCounts, count_kernel, count_routing

_ops = torch.ops.moe_p2p
_AGREE = _ops.all_to_all_agree.default
_CAPTURED = (
    "counts for the host cannot be had while a graph is captured: pass num_worst_tokens (V1) or "
    "do_cpu_sync=False (V2), or a handle of an earlier dispatch"
)
_AT_ONCE = 4  # counts of one HostCounts that the host may not have read yet
# A kernel may still write to the words of a HostCounts that is dropped: they are kept, a few KB.
_kept: list[Tensor] = []


class Given(NamedTuple):
    """Where the counts of a rank's tokens are on the host, or will be."""

    host: int  # address of [W + E + 2] int32: per rank, per expert, T, the number of the call
    number: int
    # What the op that waits for the counts counts before it does; None, -1: that was done.
    topk_idx: Tensor | None = None
    kernel: int = -1

    def gather(self, all_to_all: AllToAll, num_counts: int) -> Tensor:
        """Returns the first num_counts of every rank, [W, num_counts], on the host. Collective."""
        return self._agree(all_to_all, num_counts, 1)[0]  # type: ignore[no-any-return]

    def sizes(self, all_to_all: AllToAll, num_counts: int, alignment: int) -> HostSizes:
        """Sizes of the dispatch that is counted, whose experts' rows are rounded up. Collective."""
        gathered, counts, tokens, most, grouped = self._agree(all_to_all, num_counts, alignment)
        return HostSizes(tokens, most, grouped, counts, gathered)

    def _agree(self, all_to_all: AllToAll, num_counts: int, alignment: int) -> Any:
        host, number, topk_idx, kernel = self
        comm = all_to_all._comm
        return call(_AGREE, comm, topk_idx, kernel, num_counts, host, number, alignment)


class HostCounts:
    """Counts of one rank's tokens, on their device and for the host. One call at a time.

    Calls run one after the other, also on different streams: words are used again.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._words: dict[int, Tensor] = {}  # [_AT_ONCE, size] by size
        # The latest counts, with the tensors that count() made of them; None: a caller's, who may
        # write other counts to them.
        self._latest: collections.deque[tuple[Tensor, Tensor, int, Given] | None]
        self._latest = collections.deque(maxlen=_AT_ONCE)

    def count(
        self, topk_idx: Tensor, num_experts: int, num_ranks: int, *, num_nodes: int = 0
    ) -> RoutingCounts:
        """Does what count_routing does; given() finds the counts without another kernel."""
        if capturing(topk_idx):
            return count_routing(topk_idx, num_experts, num_ranks, num_nodes=num_nodes)
        given = self._new(topk_idx, num_ranks + num_experts + 2)
        made = count_routing(
            topk_idx,
            num_experts,
            num_ranks,
            num_nodes=num_nodes,
            host=given.host,
            number=given.number,
        )
        known = (made.num_tokens_per_rank, made.num_tokens_per_expert, topk_idx.shape[0], given)
        self._latest.append(known)
        return made

    def given(self, per_rank: Tensor, per_expert: Tensor, num_tokens: int) -> Given:
        """Gives these counts to the host, if count() has not. Runs on the current stream.

        Raises InvalidArgumentError while a graph is captured, as what waits for the counts does.
        """
        for known in self._latest:
            if known and known[0] is per_rank and known[1] is per_expert and known[2] == num_tokens:
                return known[3]
        errors.require(not capturing(per_expert), _CAPTURED)
        num_counts = per_rank.shape[0] + per_expert.shape[0]
        given = self._new(per_expert, num_counts + 2)
        kernel = count_kernel(per_expert.get_device(), num_counts)
        where = (given.host, given.number)
        call(_ops.share_counts.default, kernel, per_rank, per_expert, num_tokens, *where)
        self._latest.append(None)
        return given

    def of(self, topk_idx: Tensor, num_experts: int, num_ranks: int) -> Given:
        """Has the op that waits for these counts make them, for the host alone."""
        kernel = count_kernel(topk_idx.get_device(), num_ranks + num_experts)
        return self._new(topk_idx, num_ranks + num_experts + 2, topk_idx, kernel)

    def _new(
        self, like: Tensor, size: int, topk_idx: Tensor | None = None, kernel: int = -1
    ) -> Given:
        words = self._words.get(size)
        if words is None:
            with torch.inference_mode(False):
                words = torch.zeros(
                    (_AT_ONCE, size), dtype=torch.int32, device="cpu", pin_memory=like.is_cuda
                )
            self._words[size] = words
            _kept.append(words)
        number = next(self._numbers)
        host = words.data_ptr() + 4 * size * (number % _AT_ONCE)
        return new_tuple(Given, (host, number, topk_idx, kernel))


class HostSizes(NamedTuple):
    """Sizes of a dispatch on the host, from the counts of all ranks."""

    num_tokens: int  # that come to this rank, each once
    max_tokens: int  # largest T of any rank, or a bound
    num_grouped: int  # rows of all experts, each expert's rounded up
    counts: Tensor  # [E_local] int32: rows of each expert, rounded up
    gathered: Tensor  # [W, W + ..] int32: [i, j] tokens from rank i to rank j


class Extent(NamedTuple):
    """Sizes of a dispatch with one row per (token, rank)."""

    num_rows: int  # R
    max_tokens: int  # largest T of any rank, or a bound
    gathered: Tensor | None  # HostSizes.gathered

    @property
    def prefix(self) -> Tensor | None:
        """[W, W] int32, on the host: [i, j] rows of rank j from ranks 0 to i."""
        if self.gathered is None:
            return None
        return self.gathered[:, : self.gathered.shape[0]].cumsum(0, dtype=torch.int32)


def worst_extent(num_worst_tokens: int, num_tokens: int, world_size: int) -> Extent:
    """Returns upper bounds from num_worst_tokens, which is equal on all ranks; no exchange."""
    max_tokens = -(-num_worst_tokens // world_size)
    errors.require(
        num_tokens <= max_tokens,
        f"x has {num_tokens} tokens; with num_worst_tokens {num_worst_tokens} each of the "
        f"{world_size} ranks may bring {max_tokens}: pass the largest number of tokens of any "
        "rank times the number of ranks",
    )
    return Extent(num_worst_tokens, max_tokens, None)


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
        """Returns the next dispatch's sizes. Collective; each rank passes its topk_idx [T, K].

        Raises InvalidArgumentError unless experts are in equal blocks.
        """
        config = all_to_all.config
        errors.require(
            config.expert_rank is None,
            "sizes are worked out for experts in equal blocks, but the configuration has "
            "expert_rank: count rows of each rank's experts yourself and share them by "
            "gather_counts",
        )
        experts, ranks = config.num_experts, all_to_all.world_size
        mine = self._host_counts.of(topk_idx.contiguous(), experts, ranks)
        found = mine.sizes(all_to_all, ranks + experts + 1, alignment)
        return Sizes(found.max_tokens, found.num_grouped, found.counts)


def capturing(x: Tensor) -> bool:
    """Whether calls on x are being captured in a CUDA graph: then the host cannot know sizes."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()

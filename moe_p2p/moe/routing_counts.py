"""Counts how many tokens of a routing go to each rank, node and expert, where the routing lies.

Symbols: T tokens, K top-k, E experts in equal blocks, W ranks, L ranks per node.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from moe_p2p.library import call, register_fake
from moe_p2p.machine import jit
from moe_p2p.moe.dispatched import new_tuple

_ops = torch.ops.moe_p2p
_SHARED_BYTES = 16384  # of the kernel, in multiples: so that few shapes need one of their own


class RoutingCounts(NamedTuple):
    """Counts of one rank's tokens."""

    num_tokens_per_rank: Tensor  # [W] int32
    num_tokens_per_node: Tensor | None  # [W / L] int32; None: not requested
    num_tokens_per_expert: Tensor  # [E] int32
    is_token_in_rank: Tensor  # [T, W] bool


def count_routing(
    topk_idx: Tensor,
    num_experts: int,
    num_ranks: int,
    *,
    num_nodes: int = 0,
    host: int = 0,
    number: int = 0,
) -> RoutingCounts:
    """Counts topk_idx [T, K], int32 or int64. Entries outside 0..E-1, such as -1, are not counted.

    num_nodes: counts nodes too, of W / num_nodes ranks each; 0: does not.
    host: address of words that get the counts too (row_counts.HostCounts), then `number`.

    Raises InvalidArgumentError unless num_experts is a multiple of num_ranks.
    """
    per_rank, per_node, per_expert, in_rank = call(
        _ops.count_routing.default,
        count_kernel(topk_idx.get_device(), num_ranks + num_nodes + num_experts),
        topk_idx.contiguous(),
        num_experts,
        num_ranks,
        num_nodes,
        host,
        number,
    )
    counts = (per_rank, per_node if num_nodes else None, per_expert, in_rank)
    return new_tuple(RoutingCounts, counts)


def count_kernel(device: int, num_counts: int) -> int:
    """Returns kernels/count.cu with room for so many counts; 0 for host memory (device -1)."""
    if device < 0:
        return 0
    return _loaded(device, -(-4 * num_counts // _SHARED_BYTES))


@functools.cache
def _loaded(device: int, room: int) -> int:
    shared = room * _SHARED_BYTES
    return jit.load(device, "count.cu", "moe_p2p_count", {}, dynamic_shared_bytes=shared)


def _fake_count_routing(
    kernel: int, topk_idx: Tensor, num_experts: int, num_ranks: int, num_nodes: int, *_: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    per_rank, per_node, per_expert = (
        topk_idx.new_empty((size,), dtype=torch.int32)
        for size in (num_ranks, num_nodes, num_experts)
    )
    in_rank = topk_idx.new_empty((topk_idx.shape[0], num_ranks), dtype=torch.bool)
    return per_rank, per_node, per_expert, in_rank


def _fake_share_counts(*_: object) -> None:
    """It writes to the host's words only."""


register_fake("count_routing", _fake_count_routing)
register_fake("share_counts", _fake_share_counts)

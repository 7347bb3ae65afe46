"""The executable specification of wire bytes: what NICs carry for a call, and the lower bound.

Tests and the benchmark hold the engine's counters against this file. Per (source, other node,
step) a dispatch write is a region header, the expert counts of that node and one slot per token
that has an expert there; a combine write is a header and one row per such token. What stays inside
a node is not counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_p2p.moe.reference.int10 import row_bytes
from moe_p2p.moe.reference.routing import Routing, Tokens

LINE = 128  # slots and headers are multiples of this many bytes


@dataclass(frozen=True, kw_only=True)
class WireBytes:
    """Bytes that leave one source's node for its tokens (dispatch), or come back (combine)."""

    dispatch: int
    combine: int

    @property
    def pair(self) -> int:
        return self.dispatch + self.combine


def align(value: int, to: int) -> int:
    return -(-value // to) * to


def slot_head_bytes(topk: int) -> int:
    """Step, token (8 bytes), K expert ids of 2 bytes, K positions and K weights of 4, in lines."""
    return align(align(8 + 2 * topk, 4) + 8 * topk, LINE)


def token_bytes(tokens: Tokens) -> list[int]:
    """Bytes of one token's parts: payload, scales if there are any, extras."""
    parts = [tokens.x, *([] if tokens.scales is None else [tokens.scales]), *tokens.extras]
    return [p.element_size() * math.prod(p.shape[1:]) for p in parts]


def wire_bytes(
    routing: Routing,
    source: int,
    *,
    combine_dtype: torch.dtype,
    scalars: bool = False,
    num_steps: int = 1,
    int10: bool = False,
) -> WireBytes:
    """Exact bytes that the NICs carry for one source, all headers included.

    `int10`: combine sends it, whatever combine_dtype is. `num_steps`: chunks of the call;
    `scalars`: whether combine returns them. With several chunks, dispatch closes its steps by empty
    combines, and combine opens its own by empty dispatches: a header each.
    """
    topology, tokens = routing.topology, routing.tokens[source]
    topk = tokens.topk_idx.shape[1]
    others = topology.num_nodes - 1
    counts = align(4 * topology.ranks_per_node * (topology.max_local_experts() + 1), LINE)
    slot = align(slot_head_bytes(topk) + sum(align(b, 16) for b in token_bytes(tokens)), LINE)
    hidden = tokens.x.shape[1]
    sums = row_bytes(hidden) if int10 else hidden * combine_dtype.itemsize
    row = align(sums + (4 * topk if scalars else 0), LINE)
    slots = len(_node_pairs(routing, source))
    empty = LINE if num_steps > 1 else 0
    return WireBytes(
        dispatch=num_steps * others * (LINE + counts + empty) + slots * slot,
        combine=num_steps * others * (LINE + empty) + slots * row,
    )


def floor_bytes(
    routing: Routing, source: int, *, combine_dtype: torch.dtype, dedup: bool = True
) -> WireBytes:
    """Payload bytes only: per (token, other node); without dedup per (token, expert there)."""
    tokens, local = routing.tokens[source], routing.topology.ranks_per_node
    away = (routing.source == source) & (routing.rank // local != source // local)
    copies = len(_node_pairs(routing, source)) if dedup else int(away.sum())
    item = combine_dtype.itemsize
    return WireBytes(
        dispatch=copies * sum(token_bytes(tokens)), combine=copies * tokens.x.shape[1] * item
    )


def _node_pairs(routing: Routing, source: int) -> Tensor:
    """Distinct (token, other node) of one source."""
    local = routing.topology.ranks_per_node
    mine = routing.source == source
    node = routing.rank[mine] // local
    pairs = torch.stack([routing.token[mine], node], dim=1)[node != source // local]
    distinct: Tensor = torch.unique(pairs, dim=0)
    return distinct

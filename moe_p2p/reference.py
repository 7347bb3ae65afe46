"""The executable specification: dispatch and combine of all ranks, in one process, in plain torch.

Tests and the benchmark compare the package with this file bit for bit, so a change of behaviour
starts here. Nothing on the data path imports it.

    topology = Topology(world_size=4, ranks_per_node=2, num_experts=8)
    routing = route(topology, tokens, layout="grouped")      # tokens: one Tokens per rank
    received = [dispatch(routing, rank) for rank in range(4)]
    y = [expert(rank, r.x) for rank, r in enumerate(received)]
    out = [combine(routing, source, y, out_dtype=torch.bfloat16) for source in range(4)]

Shapes: W ranks, L ranks per node, N = W / L nodes, rank = node * L + local, T rows of one rank's
x (ranks differ), K top-k, E experts, H hidden size, R rows of an expert rank, P (token, expert)
pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["padded", "grouped"]

SCALE_BLOCK = 128  # values that share one fp8 scale
FP8_MAX = 448.0  # largest finite float8_e4m3fn
MIN_AMAX = 1e-4  # keeps the scale of an all-zero block finite and non-zero
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Where ranks and experts live. `expert_rank`: owner of each expert; None: equal blocks."""

    world_size: int
    ranks_per_node: int
    num_experts: int
    expert_rank: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.world_size % self.ranks_per_node:
            raise ValueError(
                f"world_size {self.world_size} is not a multiple of "
                f"ranks_per_node {self.ranks_per_node}"
            )
        if self.expert_rank is None and self.num_experts % self.world_size:
            raise ValueError(
                f"num_experts {self.num_experts} is not a multiple of world_size "
                f"{self.world_size}; pass expert_rank"
            )
        if self.expert_rank is not None and len(self.expert_rank) != self.num_experts:
            raise ValueError(
                f"expert_rank has {len(self.expert_rank)} entries for {self.num_experts} experts"
            )

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.ranks_per_node

    def owner(self) -> Tensor:
        """Rank of each expert, int64 [E]."""
        if self.expert_rank is not None:
            return torch.tensor(self.expert_rank, dtype=torch.int64)
        return torch.arange(self.num_experts) // (self.num_experts // self.world_size)

    def local_experts(self, rank: int) -> Tensor:
        """Global ids of the experts of `rank`, ascending; the position is the local index."""
        return (self.owner() == rank).nonzero().flatten()

    def max_local_experts(self) -> int:
        return int(torch.bincount(self.owner(), minlength=self.world_size).max())


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What one rank hands to dispatch."""

    x: Tensor  # [T, H] bf16, fp16, fp32 or e4m3
    topk_idx: Tensor  # [T, K] int, -1 = none
    topk_weights: Tensor | None = None  # [T, K] fp32; None: 1
    scales: Tensor | None = None  # [T, ceil(H / 128)] fp32, for x of fp8
    extras: tuple[Tensor, ...] = ()  # [T, ...] each, carried as they are
    num_tokens: int | None = None  # rows that count; None: T

    @property
    def count(self) -> int:
        return self.x.shape[0] if self.num_tokens is None else self.num_tokens


@dataclass(frozen=True, kw_only=True)
class Received:
    """What one expert rank gets. Rows that hold no token are zero here, source -1."""

    x: Tensor  # padded [E_local, capacity, H], grouped [capacity, H]
    scales: Tensor | None  # same rows, [..., ceil(H / 128)]
    extras: tuple[Tensor, ...]
    row_weights: Tensor  # [R] fp32
    counts: Tensor  # [E_local] int32
    offsets: Tensor  # [E_local + 1] int32 first row of each expert, then the end of the last
    source: Tensor  # [R, 2] int32 (source rank, its token)

    def rows(self) -> Tensor:
        """Indices of the rows that hold a token, expert by expert."""
        spans = zip(self.offsets.tolist(), self.counts.tolist(), strict=False)
        parts = [torch.arange(start, start + count) for start, count in spans]
        return torch.cat([torch.empty(0, dtype=torch.int64), *parts])


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Every (source, token, k) pair of one call with its place, sorted by source, token, k."""

    topology: Topology
    tokens: tuple[Tokens, ...]  # as they travel: already quantized where that was asked
    layout: Layout
    capacity: tuple[int, ...]  # [W] rows per expert (padded) or in all (grouped), of each rank
    source: Tensor  # [P] int64
    token: Tensor  # [P]
    k: Tensor  # [P]
    rank: Tensor  # [P] owner of the pair's expert
    row: Tensor  # [P] row at that owner
    counts: tuple[Tensor, ...] = field(repr=False)  # [W] of [E_local]
    offsets: tuple[Tensor, ...] = field(repr=False)  # [W] of [E_local + 1]

    def table(self, source: int) -> tuple[Tensor, Tensor]:
        """(rank, row) of each top-k entry of one source, [T, K] each; rank -1: no expert."""
        mine = self.source == source
        rank = torch.full(self.tokens[source].topk_idx.shape, -1, dtype=torch.int64)
        row = torch.zeros_like(rank)
        rank[self.token[mine], self.k[mine]] = self.rank[mine]
        row[self.token[mine], self.k[mine]] = self.row[mine]
        return rank, row


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 e4m3 with one fp32 scale per 128 values of a row (the last block may be shorter).

    amax = max(|x|, 1e-4) of the block, scale = amax / 448, q = e4m3(x * (448 / amax)), rounded to
    nearest even, saturating. x is about q * scale.

    Example: a block whose largest value is 2.0 has scale 0.004464, and 1.0 becomes q = 224.
    """
    num_rows, hidden_dim = x.shape
    num_blocks = -(-hidden_dim // SCALE_BLOCK)
    blocks = x.new_zeros(num_rows, num_blocks * SCALE_BLOCK, dtype=torch.float32)
    blocks[:, :hidden_dim] = x
    blocks = blocks.view(num_rows, num_blocks, SCALE_BLOCK)
    amax = blocks.abs().amax(dim=-1, keepdim=True).clamp_min(MIN_AMAX)
    scaled = blocks * (torch.full_like(amax, FP8_MAX) / amax)
    q = scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8).flatten(1)[:, :hidden_dim]
    return q.contiguous(), (amax / FP8_MAX).squeeze(-1)


def dequantize(q: Tensor, scales: Tensor) -> Tensor:
    """fp32 [..., H] from e4m3 [..., H] and scales [..., ceil(H / 128)]."""
    spread = scales.repeat_interleave(SCALE_BLOCK, dim=-1)[..., : q.shape[-1]]
    return q.to(torch.float32) * spread


def route(
    topology: Topology,
    tokens: Sequence[Tokens],
    *,
    layout: Layout = "padded",
    capacity: int | None = None,
    alignment: int = 1,
    max_tokens: int | None = None,
    quantized: bool = False,
) -> Routing:
    """Places every (token, expert) pair of a call.

    Rows of an expert are ordered by (source rank, token). `capacity` None is the worst case for
    `max_tokens` (None: the largest T). Raises ValueError when rows do not fit `capacity`.
    """
    if quantized:
        tokens = [_quantized(t) for t in tokens]
    limit = max([t.count for t in tokens] + [1]) if max_tokens is None else max_tokens
    source, token, k, expert = _pairs(topology, tokens)
    rank = topology.owner()[expert]
    row = torch.zeros_like(source)
    capacities, counts, offsets = [], [], []
    for owner in range(topology.world_size):
        experts = topology.local_experts(owner)
        mine = (rank == owner).nonzero().flatten()
        local = torch.searchsorted(experts, expert[mine])
        count = torch.bincount(local, minlength=len(experts))
        room = capacity
        if room is None:
            room = _worst_case(topology, tokens[0], layout, alignment, limit, len(experts))
        offset = _offsets(count, layout, room, alignment)
        _check_fits(owner, count, offset, layout, room)
        order = torch.argsort(local, stable=True)
        nth = torch.arange(len(mine)) - (torch.cumsum(count, 0) - count)[local[order]]
        row[mine[order]] = offset[local[order]] + nth
        capacities.append(room)
        counts.append(count.to(torch.int32))
        offsets.append(offset.to(torch.int32))
    return Routing(
        topology=topology,
        tokens=tuple(tokens),
        layout=layout,
        capacity=tuple(capacities),
        source=source,
        token=token,
        k=k,
        rank=rank,
        row=row,
        counts=tuple(counts),
        offsets=tuple(offsets),
    )


def dispatch(routing: Routing, rank: int) -> Received:
    """What `rank` receives."""
    mine = routing.rank == rank
    source, token, k, row = (
        a[mine] for a in (routing.source, routing.token, routing.k, routing.row)
    )
    num_local = len(routing.counts[rank])
    capacity = routing.capacity[rank]
    num_rows = capacity * num_local if routing.layout == "padded" else capacity
    lead = (num_local, capacity) if routing.layout == "padded" else (capacity,)
    starts = [0]
    for t in routing.tokens:
        starts.append(starts[-1] + t.x.shape[0])
    index = torch.tensor(starts)[source] + token  # of the pair's token among all ranks' rows

    def placed(parts: Sequence[Tensor]) -> Tensor:
        flat = torch.cat([p.reshape(p.shape[0], math.prod(p.shape[1:])) for p in parts])
        out = flat.new_zeros(num_rows, flat.shape[1])
        out.view(_raw(flat)).index_copy_(0, row, flat.view(_raw(flat)).index_select(0, index))
        return out.view(*lead, *parts[0].shape[1:])

    first = routing.tokens[0]
    scales = [t.scales for t in routing.tokens if t.scales is not None]
    row_weights = torch.zeros(num_rows)
    row_weights[row] = torch.cat([_weights(t) for t in routing.tokens])[index, k]
    where = torch.full((num_rows, 2), -1, dtype=torch.int32)
    where[row] = torch.stack([source, token], dim=1).to(torch.int32)
    return Received(
        x=placed([t.x for t in routing.tokens]),
        scales=placed(scales) if scales else None,
        extras=tuple(
            placed([t.extras[i] for t in routing.tokens]) for i in range(len(first.extras))
        ),
        row_weights=row_weights,
        counts=routing.counts[rank],
        offsets=routing.offsets[rank],
        source=where,
    )


def combine(
    routing: Routing,
    source: int,
    y: Sequence[Tensor],
    *,
    out_dtype: torch.dtype,
    weighted: bool = True,
) -> Tensor:
    """The combined rows of one source, [T, H] of out_dtype; `y` holds the rows of every rank.

    Sums in fp32, multiply then add, each from zero, rounded to out_dtype after each stage:
    1. expert rank: over the rank's experts among the token's top-k, k ascending;
    2. for tokens from another node, there: over its ranks that hold a partial, ascending;
    3. source: over nodes ascending, the own node contributing rank by rank, others their sum.
    """
    topology, local = routing.topology, routing.topology.ranks_per_node
    rank_tk, row_tk = routing.table(source)
    weights = _weights(routing.tokens[source]) if weighted else None
    out = torch.zeros(rank_tk.shape[0], y[0].shape[-1])
    for node in range(topology.num_nodes):
        own = node == source // local
        total = out if own else torch.zeros_like(out)
        for rank in range(node * local, (node + 1) * local):
            total += _partial(rank_tk == rank, row_tk, y[rank], weights).to(out_dtype)
        if not own:
            out += total.to(out_dtype)
    return out.to(out_dtype)


def combine_scalars(routing: Routing, source: int, row_scalars: Sequence[Tensor]) -> Tensor:
    """Scalars of the rows, back at their (token, k): fp32 [T, K], zero: no expert."""
    rank_tk, row_tk = routing.table(source)
    out = torch.zeros(rank_tk.shape)
    for rank, scalars in enumerate(row_scalars):
        hit = rank_tk == rank
        out[hit] = scalars.flatten()[row_tk[hit]]
    return out


# --- parts ---------------------------------------------------------------------------------------


def _quantized(tokens: Tokens) -> Tokens:
    q, scales = quantize(tokens.x)
    return Tokens(
        x=q,
        scales=scales,
        topk_idx=tokens.topk_idx,
        topk_weights=tokens.topk_weights,
        extras=tokens.extras,
        num_tokens=tokens.num_tokens,
    )


def _weights(tokens: Tokens) -> Tensor:
    if tokens.topk_weights is None:
        return torch.ones(tokens.topk_idx.shape)
    return tokens.topk_weights.detach().to(torch.float32)


def _pairs(topology: Topology, tokens: Sequence[Tokens]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(source, token, k, expert) of every pair, sorted in that order."""
    if len(tokens) != topology.world_size:
        raise ValueError(f"tokens of {len(tokens)} ranks for world_size {topology.world_size}")
    parts = []
    for source, t in enumerate(tokens):
        idx = t.topk_idx[: t.count].to(torch.int64)
        if idx.numel() and (int(idx.max()) >= topology.num_experts or int(idx.min()) < -1):
            raise ValueError(f"topk_idx of rank {source} is outside -1..{topology.num_experts - 1}")
        token, k = (idx >= 0).nonzero(as_tuple=True)
        parts.append(torch.stack([torch.full_like(token, source), token, k, idx[token, k]]))
    source_, token_, k_, expert_ = torch.cat(parts, dim=1)
    return source_, token_, k_, expert_


def _worst_case(
    topology: Topology, first: Tokens, layout: Layout, alignment: int, max_tokens: int, experts: int
) -> int:
    tokens = topology.world_size * max_tokens
    if layout == "padded":
        return tokens
    return tokens * min(first.topk_idx.shape[1], experts) + (alignment - 1) * experts


def _offsets(count: Tensor, layout: Layout, capacity: int, alignment: int) -> Tensor:
    if layout == "padded":
        return torch.arange(len(count) + 1) * capacity
    padded = (count + alignment - 1) // alignment * alignment
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(padded, 0)])


def _check_fits(rank: int, count: Tensor, offset: Tensor, layout: Layout, capacity: int) -> None:
    need = max([0, *count.tolist()]) if layout == "padded" else int(offset[-1])
    if need > capacity:
        raise ValueError(f"rank {rank} gets {need} rows, capacity is {capacity}")


def _partial(hit: Tensor, row_tk: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
    """fp32 [T, H]: sum over k ascending of weight * y[row] where `hit` [T, K]."""
    flat = y.reshape(-1, y.shape[-1])
    total = torch.zeros(hit.shape[0], flat.shape[1])
    for k in range(hit.shape[1]):
        token = hit[:, k].nonzero().flatten()
        rows = flat.index_select(0, row_tk[token, k]).to(torch.float32)
        total[token] += rows if weights is None else weights[token, k, None] * rows
    return total


def _raw(x: Tensor) -> torch.dtype:
    return torch.uint8 if x.dtype == FP8 else x.dtype

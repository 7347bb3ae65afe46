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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from moe_p2p.machine.fp8 import FP8, ScaleFormat, pack_ue8m0, quantize
from moe_p2p.moe.layouts import RowLayout
from moe_p2p.moe.reference import block16, int10

Layout = RowLayout
SumOrder = Literal["ranks", "topk", "rows"]
CombineDtype = Literal["int10", "int10_nodes", "block16"]


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
            return torch.tensor(self.expert_rank, dtype=torch.int64, device="cpu")
        return torch.arange(self.num_experts, device="cpu") // (self.num_experts // self.world_size)

    def local_experts(self, rank: int) -> Tensor:
        """Global ids of the experts of `rank`, ascending; the position is the local index."""
        return (self.owner() == rank).nonzero().flatten()

    def max_local_experts(self) -> int:
        return int(torch.bincount(self.owner(), minlength=self.world_size).max())


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Arguments of dispatch on one rank."""

    x: Tensor  # [T, H] bf16, fp16, fp32 or e4m3
    topk_idx: Tensor  # [T, K] int, -1 = none
    topk_weights: Tensor | None = None  # [T, K] fp32; None: 1
    scales: Tensor | None = None  # [T, P] fp32 or int32, for x of fp8
    extras: tuple[Tensor, ...] = ()  # [T, ...] each, copied unchanged
    num_tokens: int | None = None  # first rows that are tokens; None: T

    @property
    def count(self) -> int:
        return self.x.shape[0] if self.num_tokens is None else self.num_tokens


def merge_duplicates(tokens: Tokens) -> Tokens:
    """What a dispatch with merge_duplicates sends: an expert that a row names more than once stays
    at the first place, with the sum of its weights, which is exact and then rounded to float32.
    """
    idx = tokens.topk_idx.clone()
    weights = torch.zeros(idx.shape, dtype=torch.float32, device=idx.device)
    for t, experts in enumerate(tokens.topk_idx.tolist()):
        for k, expert in enumerate(experts):
            places = [i for i, each in enumerate(experts) if each == expert >= 0]
            if places[:1] == [k]:
                given = [1.0] * len(places)
                if tokens.topk_weights is not None:
                    given = tokens.topk_weights[t, places].tolist()
                weights[t, k] = math.fsum(given)
            else:
                idx[t, k] = -1
    return replace(tokens, topk_idx=idx, topk_weights=weights)


@dataclass(frozen=True, kw_only=True)
class Received:
    """Results of dispatch on one expert rank. Rows without a token are zero here, source -1."""

    x: Tensor  # padded [E_local, capacity, H], else [capacity, H]
    scales: Tensor | None  # same rows, [..., P]
    extras: tuple[Tensor, ...]
    row_weights: Tensor  # [R] fp32, by_rank [R, K]
    counts: Tensor  # [E_local] int32 tokens of each expert
    # [E_local + 1] int32 first row of each expert, by_rank [W + 1] of each source; then the end
    offsets: Tensor
    source: Tensor  # [R, 2] int32 (source rank, its token)
    ranges: Tensor  # [E_local, W] int64: (source's first row within the expert) << 32 | its rows
    row_topk: Tensor | None  # by_rank: [R, K] local expert ids, -1: expert of another rank

    def rows(self) -> Tensor:
        """Indices of the rows that hold a token, in order."""
        if self.row_topk is not None:
            return torch.arange(int(self.offsets[-1]), device="cpu")
        spans = zip(self.offsets.tolist(), self.counts.tolist(), strict=False)
        parts = [torch.arange(start, start + count, device="cpu") for start, count in spans]
        return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *parts])


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Every (source, token, k) pair of one call with its place, sorted by source, token, k."""

    topology: Topology
    tokens: tuple[Tokens, ...]  # as they travel: already quantized if requested
    layout: Layout
    scale_format: ScaleFormat
    capacity: tuple[int, ...]  # [W] rows per expert (padded) or rows of all experts, per rank
    source: Tensor  # [P] int64
    token: Tensor  # [P]
    k: Tensor  # [P]
    rank: Tensor  # [P] owner of the pair's expert
    local: Tensor  # [P] local index of the expert there
    row: Tensor  # [P] row at that owner; by_rank, pairs of one token and owner share a row
    first: Tensor  # [P] by_rank: first pair of its token and owner; else always true
    counts: tuple[Tensor, ...] = field(repr=False)  # [W] of [E_local]
    offsets: tuple[Tensor, ...] = field(repr=False)  # [W] of [E_local + 1], by_rank [W + 1]

    def table(self, source: int) -> tuple[Tensor, Tensor]:
        """Returns rank and row, [T, K] each, of one source's top-k entries; rank -1: no row.

        by_rank: only the first entry of each rank has the row.
        """
        mine = (self.source == source) & self.first
        rank = torch.full_like(self.tokens[source].topk_idx, -1, dtype=torch.int64)
        row = torch.zeros_like(rank)
        rank[self.token[mine], self.k[mine]] = self.rank[mine]
        row[self.token[mine], self.k[mine]] = self.row[mine]
        return rank, row


def route(
    topology: Topology,
    tokens: Sequence[Tokens],
    *,
    layout: Layout = "padded",
    capacity: int | None = None,
    alignment: int = 1,
    max_tokens: int | None = None,
    quantized: bool = False,
    scale_format: ScaleFormat = "float32",
) -> Routing:
    """Places every (token, expert) pair of a call.

    Rows of an expert, or by_rank all rows, are ordered by (source rank, token). `capacity` None is
    the worst case for `max_tokens` (None: the largest T). Raises ValueError when rows do not fit
    `capacity`.
    """
    if quantized:
        tokens = [_quantized(t, scale_format) for t in tokens]
    limit = max([t.count for t in tokens] + [1]) if max_tokens is None else max_tokens
    source, token, k, expert = _pairs(topology, tokens)
    rank = topology.owner()[expert]
    local, row = torch.zeros_like(source), torch.zeros_like(source)
    first = torch.ones_like(source, dtype=torch.bool)
    capacities, counts, offsets = [], [], []
    for owner in range(topology.world_size):
        experts = topology.local_experts(owner)
        mine = (rank == owner).nonzero().flatten()
        local[mine] = torch.searchsorted(experts, expert[mine])
        count = torch.bincount(local[mine], minlength=len(experts))
        room = capacity
        if room is None:
            room = _worst_case(topology, tokens[0], layout, alignment, limit, len(experts))
        if layout == "by_rank":
            key = torch.stack([source[mine], token[mine]])  # sorted
            new = torch.ones_like(mine, dtype=torch.bool)
            new[1:] = (key[:, 1:] != key[:, :-1]).any(dim=0)
            first[mine], row[mine] = new, torch.cumsum(new, 0) - 1
            per_source = torch.bincount(source[mine][new], minlength=topology.world_size)
            offset = _from_zero(per_source)
        else:
            offset = _offsets(count, layout, room, alignment)
            order = torch.argsort(local[mine], stable=True)
            start = torch.cumsum(count, 0) - count
            nth = torch.arange(len(mine), device="cpu") - start[local[mine][order]]
            row[mine[order]] = offset[local[mine][order]] + nth
        _check_fits(owner, count, offset, layout, room)
        capacities.append(room)
        counts.append(count.to(torch.int32))
        offsets.append(offset.to(torch.int32))
    return Routing(
        topology=topology,
        tokens=tuple(tokens),
        layout=layout,
        scale_format=scale_format,
        capacity=tuple(capacities),
        source=source,
        token=token,
        k=k,
        rank=rank,
        local=local,
        row=row,
        first=first,
        counts=tuple(counts),
        offsets=tuple(offsets),
    )


def dispatch(routing: Routing, rank: int) -> Received:
    """What `rank` receives."""
    mine = routing.rank == rank
    source, token, k, local, row = (
        a[mine] for a in (routing.source, routing.token, routing.k, routing.local, routing.row)
    )
    num_local = len(routing.counts[rank])
    capacity = routing.capacity[rank]
    num_rows = capacity * num_local if routing.layout == "padded" else capacity
    lead = (num_local, capacity) if routing.layout == "padded" else (capacity,)
    starts = [0]
    for t in routing.tokens:
        starts.append(starts[-1] + t.x.shape[0])
    # Index of each pair's token among the concatenated tokens of all ranks.
    index = torch.tensor(starts, device="cpu")[source] + token

    def placed(parts: Sequence[Tensor]) -> Tensor:
        flat = torch.cat([p.reshape(p.shape[0], math.prod(p.shape[1:])) for p in parts])
        out = flat.new_zeros(num_rows, flat.shape[1])
        out.view(_raw(flat)).index_copy_(0, row, flat.view(_raw(flat)).index_select(0, index))
        return out.view(*lead, *parts[0].shape[1:])

    first = routing.tokens[0]
    scales = [t.scales for t in routing.tokens if t.scales is not None]
    if routing.scale_format == "ue8m0":
        scales = [pack_ue8m0(s) for s in scales]
    weights = torch.cat([_weights(t) for t in routing.tokens])[index, k]
    row_topk = None
    if routing.layout == "by_rank":
        shape = (num_rows, first.topk_idx.shape[1])
        row_weights, row_topk = _zeros(shape), first.topk_idx.new_full(shape, -1)
        row_weights[row, k], row_topk[row, k] = weights, local.to(row_topk.dtype)
    else:
        row_weights = _zeros((num_rows,))
        row_weights[row] = weights
    where = torch.full((num_rows, 2), -1, dtype=torch.int32, device="cpu")
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
        ranges=_ranges(local, source, num_local, routing.topology.world_size),
        row_topk=row_topk,
    )


def combine(
    routing: Routing,
    source: int,
    y: Sequence[Tensor],
    *,
    out_dtype: torch.dtype,
    weighted: bool | None = None,
    bias: Sequence[Tensor] = (),
    order: SumOrder = "ranks",
    combine_dtype: CombineDtype | None = None,
) -> Tensor:
    """The combined rows of one source, [T, H] of out_dtype; `y` holds the rows of every rank.

    `weighted` None: True except by_rank, whose rows are partial sums already. `bias`: [T, H] each.

    Sums in fp32, multiply then add, each from 0.0 (so -0.0 alone gives 0.0), rounded to out_dtype
    after each stage:
    1. on the expert rank: over its experts among the token's top-k, k ascending;
    2. on the expert's node, if it is not the source's: over ranks with a partial sum, ascending;
    3. on the source: bias, then over nodes ascending: of the own node each rank's partial sum, of
        another node its total.
    On one node also, in the third stage after the bias, with order "topk": each rank's partial sum
    at the last k of its experts, k ascending; with "rows": each row, rounded to out_dtype, at its
    k, without the first stage. By rank, "rows" is "topk".

    combine_dtype "int10": the first two stages round to int10 (int10.py) instead; a total of one
    partial sum is that sum, not rounded again. "int10_nodes": only the second stage. "block16":
    the first two stages round to block16 (block16.py), which rounds nothing twice.
    """
    if weighted is None:
        weighted = routing.layout != "by_rank"
    topology, local = routing.topology, routing.topology.ranks_per_node
    rank_tk, row_tk = routing.table(source)
    weights = _weights(routing.tokens[source]) if weighted else None
    out = _zeros((rank_tk.shape[0], y[0].shape[-1]))
    for term in bias:
        out += term.to(torch.float32)
    for hits in _hits_by_topk(routing, source, order):
        for rank in range(topology.world_size):
            out += _partial(hits & (rank_tk == rank), row_tk, y[rank], weights).to(out_dtype)
    assert order == "ranks" or combine_dtype is None, "combine_dtype is for order='ranks'"
    for node in range(topology.num_nodes if order == "ranks" else 0):
        own = node == source // local
        total = out if own else torch.zeros_like(out)
        for rank in range(node * local, (node + 1) * local):
            partial = _partial(rank_tk == rank, row_tk, y[rank], weights)
            near = combine_dtype in ("int10", "block16")
            total += _round(partial, combine_dtype) if near else partial.to(out_dtype)
        if own or combine_dtype is None:
            out = out if own else out + total.to(out_dtype)
            continue
        sent = _round(total, combine_dtype)
        if combine_dtype == "int10":
            holders = [(rank_tk == node * local + i).any(1) for i in range(local)]
            sent = sent.where(torch.stack(holders).sum(0)[:, None] > 1, total)
        out += sent
    return out.to(out_dtype)


def _round(sums: Tensor, combine_dtype: CombineDtype | None) -> Tensor:
    """What arrives of sums that travel so."""
    return block16.round_trip(sums) if combine_dtype == "block16" else int10.round_trip(sums)


def combine_scalars(routing: Routing, source: int, row_scalars: Sequence[Tensor]) -> Tensor:
    """Returns the rows' scalars at their (token, k): fp32 [T, K], zero where there is no expert.

    by_rank: all K of a row go back; they are summed over the token's ranks in combine's order.
    """
    local = routing.topology.ranks_per_node
    rank_tk, row_tk = routing.table(source)
    out = _zeros(rank_tk.shape)
    for node in range(routing.topology.num_nodes):
        own = node == source // local
        total = out if own else torch.zeros_like(out)
        for rank in range(node * local, (node + 1) * local):
            hit, scalars = rank_tk == rank, row_scalars[rank]
            if routing.layout == "by_rank":
                token, k = hit.nonzero(as_tuple=True)
                total[token] += scalars[row_tk[token, k]]
            else:
                total[hit] += scalars.flatten()[row_tk[hit]]
        if not own:
            out += total
    return out


# --- parts ---------------------------------------------------------------------------------------


def _quantized(tokens: Tokens, scale_format: ScaleFormat) -> Tokens:
    q, scales = quantize(tokens.x, scale_format)
    return replace(tokens, x=q, scales=scales)


def _weights(tokens: Tokens) -> Tensor:
    if tokens.topk_weights is None:
        return torch.ones_like(tokens.topk_idx, dtype=torch.float32)
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
    if layout != "grouped":
        return tokens
    return tokens * min(first.topk_idx.shape[1], experts) + (alignment - 1) * experts


def _offsets(count: Tensor, layout: Layout, capacity: int, alignment: int) -> Tensor:
    if layout == "padded":
        return torch.arange(len(count) + 1, device="cpu") * capacity
    padded = (count + alignment - 1) // alignment * alignment
    return _from_zero(padded)


def _from_zero(count: Tensor) -> Tensor:
    """0, then the running sums of the counts."""
    return torch.cat([count.new_zeros(1), torch.cumsum(count, 0)])


def _zeros(shape: Sequence[int]) -> Tensor:
    """fp32, whatever torch's default type and device are."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")


def _check_fits(rank: int, count: Tensor, offset: Tensor, layout: Layout, capacity: int) -> None:
    need = max([0, *count.tolist()]) if layout == "padded" else int(offset[-1])
    if need > capacity:
        raise ValueError(f"rank {rank} gets {need} rows, capacity is {capacity}")


def _partial(hit: Tensor, row_tk: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
    """fp32 [T, H]: sum over k ascending of weight * y[row] where `hit` [T, K]."""
    flat = y.reshape(-1, y.shape[-1])
    total = _zeros((hit.shape[0], flat.shape[1]))
    for k in range(hit.shape[1]):
        token = hit[:, k].nonzero().flatten()
        rows = flat.index_select(0, row_tk[token, k]).to(torch.float32)
        total[token] += rows if weights is None else weights[token, k, None] * rows
    return total


def _hits_by_topk(routing: Routing, source: int, order: SumOrder) -> Iterator[Tensor]:
    """For each k, the entries [T, K] that are added there; none for "ranks"."""
    if order == "ranks":
        return
    assert routing.topology.num_nodes == 1, "each node adds up before it sends"
    topk_idx = routing.tokens[source].topk_idx.to(torch.int64)
    owner = routing.topology.owner()[topk_idx.clamp(min=0)].where(topk_idx >= 0, -1)
    for k in range(owner.shape[1]):
        mine = owner == owner[:, k, None]
        if order == "rows" and routing.layout != "by_rank":
            hits = torch.zeros_like(mine)
            hits[:, k] = True
        else:
            hits = mine & ~mine[:, k + 1 :].any(1, keepdim=True)
        yield hits


def _ranges(local: Tensor, source: Tensor, num_local: int, world_size: int) -> Tensor:
    flat = torch.bincount(local * world_size + source, minlength=num_local * world_size)
    count = flat.view(num_local, world_size)
    return (torch.cumsum(count, 1) - count) << 32 | count


def _raw(x: Tensor) -> torch.dtype:
    return torch.uint8 if x.dtype == FP8 else x.dtype

"""Carries out a plan on bytearrays, as an engine with two-level strides would, and checks it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_p2p.kv import (
    CX7,
    KVCounts,
    KVGroup,
    KVLayout,
    KVLink,
    KVMemory,
    KVPlan,
    KVRequest,
    counts,
    dense_memory,
    indices,
    kv_plan,
    resolve,
    span_of,
)
from moe_p2p.kv.ring import Copier, Piece, Rows, rows_of_request
from tests.support.kv_oracle import UNTOUCHED, Cache, value_of

DIRECT = replace(CX7, pack=False)


@dataclass(frozen=True)
class Transfer:
    """One request: `prefix` tokens are at the target already. seed: of the choice of pages."""

    source: KVLayout
    target: KVLayout
    tokens: int
    prefix: int
    seed: int = 0
    chunk: int | None = None  # where a second chunk begins
    link: KVLink = DIRECT


def pages_needed(layout: KVLayout, group: KVGroup, tokens: int) -> int:
    return 1 if group.kind == "state" else math.ceil(tokens / layout.page_tokens(group))


def make_cache(layout: KVLayout, tokens: int, seed: int) -> Cache:
    generator = torch.Generator().manual_seed(seed)
    pages, pool = {}, {}
    for group in layout.groups:
        needed = pages_needed(layout, group, tokens)
        pool[group.name] = needed + 2
        pages[group.name] = torch.randperm(needed + 2, generator=generator)[:needed].tolist()
    return Cache(layout, pages, pool)


def run(transfer: Transfer) -> None:
    """Raises AssertionError unless every byte that should arrive did, once, and no other."""
    tokens = transfer.tokens
    source = make_cache(transfer.source, tokens, transfer.seed)
    target = make_cache(transfer.target, tokens, transfer.seed + 1)
    held = {group.name: 1 if group.kind == "state" else tokens for group in source.layout.groups}
    source.fill(held)
    plan = kv_plan(transfer.source, transfer.target, link=transfer.link)
    cut = tokens if transfer.chunk is None else transfer.chunk
    chunks = [(transfer.prefix, cut), (cut, tokens)] if cut < tokens else [(transfer.prefix, cut)]
    written = [[bytearray(len(m)) for m in memories] for memories in target.memory]
    for begin, end in chunks:
        _copy(plan, source, target, written, (begin, end, tokens))
    _compare(plan, target, written, transfer)


def _copy(
    plan: KVPlan,
    source: Cache,
    target: Cache,
    written: list[list[bytearray]],
    span: tuple[int, int, int],
) -> None:
    names = [[group.name for group in side.groups] for side in (plan.source, plan.target)]
    ours, theirs = (
        [_memory(side, rank) for rank in range(len(side.memory))] for side in (source, target)
    )
    lists = [
        {name: torch.tensor(pages, dtype=torch.int32) for name, pages in side.pages.items()}
        for side in (source, target)
    ]
    for to_rank in range(plan.target.world_size):
        promised = counts(plan, to_rank, *span)
        for from_rank in range(plan.source.world_size):
            done = KVCounts(0, 0, 0, 0, 0)
            for request in resolve(plan, ours[from_rank], theirs[to_rank]):
                name = request.move.group
                tokens = span_of(plan, plan.source.group(name), *span)
                units = indices(request.move, tokens, lists[0][name], lists[1][name])
                if not len(units[0]):
                    continue
                to = names[1].index(name)
                memories = (
                    source.memory[from_rank][names[0].index(name)],
                    target.memory[to_rank][to],
                    written[to_rank][to],
                )
                writes = (_pack if request.move.why_packed else _copy_request)(
                    request, units, *memories
                )
                done = _added(done, request, len(units[0]), writes)
            assert done == promised.get(from_rank, KVCounts(0, 0, 0, 0, 0))


def _pack(
    request: KVRequest,
    units: tuple[Tensor, Tensor],
    source: bytearray,
    target: bytearray,
    written: bytearray,
) -> int:
    """As moe_p2p/kv/packing.py and unpacking.py do; returns the number of parts."""
    move, writes, copier = request.move, 0, Copier(torch.device("cpu"), 1)
    here, there = (copier.place(each.to(torch.int64)) for each in units)
    most = move.rows_per_write * (1 if move.lands else 2)  # of parts that follow each other
    left: Piece | None = Piece(request.layer, 0, (0, 0), 0, len(units[0]) * move.shape.num_rows)
    while left is not None:
        piece, left = left.cut(most)
        packed = torch.empty(piece.rows * move.shape.row_bytes, dtype=torch.uint8)
        memory = torch.frombuffer(source, dtype=torch.uint8)
        where = rows_of_request(request, at_source=True)
        copier.copy(Rows(memory, here, where, piece.first), packed, gather=True)
        if move.lands:
            _land(request, units[1][piece.first // move.shape.num_rows :], packed, target)
        else:
            memory = torch.frombuffer(target, dtype=torch.uint8)
            where = rows_of_request(request, at_source=False)
            copier.copy(Rows(memory, there, where, piece.first), packed, gather=False)
        writes += -(-piece.rows // move.rows_per_write)
    # What was written, and how often, as row by row.
    _copy_request(request, units, source, bytearray(target), written)
    return writes


def _land(request: KVRequest, units: Tensor, packed: Tensor, target: bytearray) -> None:
    """Whole units, each of them one run in its page."""
    size = request.move.unit_bytes
    assert len(packed) % size == 0
    for i in range(len(packed) // size):
        to = request.target.offset + int(units[i]) * request.move.shape.target_unit
        target[to : to + size] = bytes(packed[i * size : (i + 1) * size].tolist())


def _copy_request(
    request: KVRequest,
    units: tuple[Tensor, Tensor],
    source: bytearray,
    target: bytearray,
    written: bytearray,
) -> int:
    shape = request.move.shape
    size = shape.row_bytes
    for unit, to_unit in zip(*(each.tolist() for each in units), strict=True):
        at = request.source.offset + unit * shape.source_unit
        to = request.target.offset + to_unit * shape.target_unit
        for _ in range(shape.num_rows):
            assert 0 <= at <= len(source) - size, "a row leaves the source"
            assert 0 <= to <= len(target) - size, "a row leaves the target"
            target[to : to + size] = source[at : at + size]
            for byte in range(to, to + size):
                written[byte] += 1
            at, to = at + shape.source_row_stride, to + shape.target_row_stride
    return 1


def _added(done: KVCounts, request: KVRequest, units: int, writes: int) -> KVCounts:
    rows = units * request.move.shape.num_rows
    nbytes = rows * request.move.shape.row_bytes
    return KVCounts(
        done[0] + 1, done[1] + units, done[2] + rows, done[3] + nbytes, done[4] + writes
    )


def _memory(cache: Cache, rank: int) -> KVMemory:
    """As `dense_memory` says it lies; each group has a pool of its own size."""
    layers = []
    for at, group in enumerate(cache.layout.groups):
        memory, sizes = dense_memory(cache.layout, rank, cache.pool[group.name])
        layers.append(memory.layers[at])
        assert sizes[at] == len(cache.memory[rank][at])
    return KVMemory(rank, tuple(layers), (b"",) * len(layers))


def _compare(
    plan: KVPlan, target: Cache, written: list[list[bytearray]], transfer: Transfer
) -> None:
    for rank, memories in enumerate(target.memory):
        for number, group in enumerate(target.layout.groups):
            span = span_of(plan, group, transfer.prefix, transfer.tokens)
            if group.kind == "state":
                span, padded = span, span.end
            else:
                page = plan.target.page_tokens(group)
                padded = math.ceil(span.end / page) * page
                if group.window is not None:
                    assert span.begin <= max(transfer.prefix, transfer.tokens - group.window)
            memory, times = memories[number], written[rank][number]
            free = set()
            for what, at in target.each(rank, group, span.begin, padded):
                if what.token >= span.end:
                    free.add(at)  # of the last page, behind the last token: anything
                    continue
                assert memory[at] == value_of(group.name, what), (rank, group.name, what)
                assert times[at] == 1, (rank, group.name, what, f"written {times[at]} times")
                free.add(at)
            for at, byte in enumerate(memory):
                if at not in free:
                    assert byte == UNTOUCHED, (rank, group.name, at, "was overwritten")
                    assert not times[at], (rank, group.name, at, "was overwritten")

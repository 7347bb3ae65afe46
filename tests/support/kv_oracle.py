"""A KV cache byte for byte, written without a stride: what moe_p2p.kv must agree with.

Memory is the list of its bytes in order, each with the name of what it holds. Who keeps a token is
found by dealing out all tokens before it. Slow on purpose; nothing here is taken from moe_p2p.kv
but the fields of a layout.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from moe_p2p.kv import KVGroup, KVLayout

UNTOUCHED = 0xCD


class Byte(NamedTuple):
    """layer, page, head and slot are counted on one rank; kv is 0 for K, 1 for V."""

    layer: int
    page: int
    kv: int
    head: int
    slot: int
    byte: int


class Logical(NamedTuple):
    layer: int
    head: int
    token: int
    kv: int
    byte: int


def value_of(group: str, what: Logical) -> int:
    """Any bytes would do, but for those that a wrong layer, head, token or part shares."""
    layer, head, token, kv, byte = what
    mixed = (len(group) * 31 + layer * 17 + head * 101 + token * 7 + token // 13) * 59
    return (mixed + kv * 127 + byte * 29 + (mixed >> 7)) % 251


def heads_on(group: KVGroup, tp: int, tp_rank: int) -> list[int]:
    if tp <= group.heads:
        return [head for head in range(group.heads) if head * tp // group.heads == tp_rank]
    return [head for head in range(group.heads) if tp_rank * group.heads // tp == head]


def layers_on(layout: KVLayout, group: KVGroup, stage: int) -> list[int]:
    num_layers = max(max(each.layers) for each in layout.groups) + 1
    stages = layout.stages or [num_layers // layout.pp] * layout.pp
    owner = [at for at, count in enumerate(stages) for _ in range(count)]
    return [layer for layer in group.layers if owner[layer] == stage]


@functools.lru_cache(maxsize=256)
def places_of_tokens(
    page_size: int, dcp: int, interleave: int, tokens: int
) -> list[tuple[int, int, int]]:
    """(dcp rank, page, slot) of each token, dealt out one after the other."""
    held, places = [0] * dcp, []
    for token in range(tokens):
        rank = token // interleave % dcp
        places.append((rank, held[rank] // page_size, held[rank] % page_size))
        held[rank] += 1
    return places


def bytes_in_order(
    layout: KVLayout, group: KVGroup, num_layers: int, num_pages: int
) -> Iterator[Byte | None]:
    """What each byte of a rank's memory of a group holds; None: padding."""
    num_heads = max(group.heads // layout.tp, 1)
    layers, pages = range(num_layers), range(num_pages)
    sizes = (group.k_bytes, group.v_bytes)

    def inside(layer: int, page: int, kinds: list[int]) -> Iterator[Byte]:
        heads, slots = range(num_heads), range(group.page_size)
        for kv in kinds if layout.keeps_kv_apart else [None]:
            n_first = layout.order in ("NHD", "LBNHC", "BLNHC")
            for outer, inner in product(slots, heads) if n_first else product(heads, slots):
                slot, head = (outer, inner) if n_first else (inner, outer)
                for each in kinds if kv is None else [kv]:
                    for byte in range(sizes[each]):
                        yield Byte(layer, page, each, head, slot, byte)

    def padded(found: list[Byte]) -> Iterator[Byte | None]:
        yield from found
        yield from [None] * ((group.page_stride or len(found)) - len(found))

    if layout.order in ("BLNHC", "BLHNC"):
        for page in pages if num_layers else ():
            yield from padded([b for layer in layers for b in inside(layer, page, [0, 1])])
    elif layout.kv_split == "layer":
        for layer, kv in product(layers, [0, 1] if group.v_bytes else [0]):
            for page in pages:
                yield from padded(list(inside(layer, page, [kv])))
    else:
        for layer, page in product(layers, pages):
            yield from padded(list(inside(layer, page, [0, 1])))


@functools.lru_cache(maxsize=256)
def addresses(
    layout: KVLayout, group: KVGroup, num_layers: int, num_pages: int
) -> tuple[dict[Byte, int], int]:
    """Where each byte is, and the size of the memory."""
    order = list(bytes_in_order(layout, group, num_layers, num_pages))
    return {what: at for at, what in enumerate(order) if what is not None}, len(order)


class Cache:
    """Memory of all ranks of one side: `memory[rank][group]`.

    pages: per group name, the request's pages in order.
    """

    def __init__(self, layout: KVLayout, pages: dict[str, list[int]], pool: dict[str, int]) -> None:
        self.layout, self.pages, self.pool = layout, pages, pool
        self.memory = [
            [bytearray([UNTOUCHED]) * self._map(rank, group)[1] for group in layout.groups]
            for rank in range(layout.tp * layout.pp)
        ]

    def _map(self, rank: int, group: KVGroup) -> tuple[dict[Byte, int], int]:
        layers = layers_on(self.layout, group, rank // self.layout.tp)
        return addresses(self.layout, group, len(layers), self.pool[group.name])

    def each(
        self, rank: int, group: KVGroup, first: int, last: int
    ) -> Iterator[tuple[Logical, int]]:
        """Every byte of tokens first to last that a rank keeps, and where."""
        layout = self.layout
        tp_rank = rank % layout.tp
        dcp = 1 if group.kind == "state" else layout.dcp
        interleave = 1 if dcp == 1 else layout.dcp_interleave
        where, _ = self._map(rank, group)
        heads = heads_on(group, layout.tp, tp_rank)
        layers = layers_on(layout, group, rank // layout.tp)
        places = places_of_tokens(group.page_size, dcp, interleave, last)
        for token in range(first, last):
            dealt_to, page, slot = places[token]
            if dealt_to != tp_rank % dcp:
                continue
            page = self.pages[group.name][page]
            for (at, layer), (place, head), kv in product(
                enumerate(layers), enumerate(heads), (0, 1)
            ):
                for byte in range((group.k_bytes, group.v_bytes)[kv]):
                    found = where[Byte(at, page, kv, place, slot, byte)]
                    yield Logical(layer, head, token, kv, byte), found

    def fill(self, tokens: dict[str, int]) -> None:
        for rank, memories in enumerate(self.memory):
            for group, memory in zip(self.layout.groups, memories, strict=True):
                for what, at in self.each(rank, group, 0, tokens[group.name]):
                    memory[at] = value_of(group.name, what)

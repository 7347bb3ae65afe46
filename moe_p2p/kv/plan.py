"""The plan of a KV transfer: which strided bytes go from which rank to which, for every request.

`kv_plan` is pure and made once per pair of workers, by both of them from both layouts. Its table is
equal for all requests and does not grow with layers or pages; a request adds page indices only
(moe_p2p/kv/requests.py). docs/kv.md explains the table.

Pages of the two sides may differ in size, and tokens may be dealt to several ranks on either, so
which tokens of a source page are which of a target page repeats only after a *period* of tokens
that is whole pages on both. A *cell* is what one source page and one target page of it share:

    source pages of 4 tokens, target pages of 6: a period of 12 tokens, cells 0-3 4-5 6-7 8-11
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from moe_p2p.engine.strides import Level, Rows, progression, rows_of
from moe_p2p.errors import require, require_type
from moe_p2p.kv.layout import Holding, KVGroup, KVLayout, Part
from moe_p2p.kv.link import CX7, KVLink

# Of a period, in blocks. Each is spelled out: a million take seconds and 500 MB.
MOST_BLOCKS = 1 << 20


class Dealing(NamedTuple):
    """Page size on one rank, ranks that tokens are dealt to, tokens dealt at a time."""

    page_size: int
    ranks: int
    interleave: int

    def place(self, token: int) -> tuple[int, int, int]:
        """(rank, page on that rank, token in that page)."""
        turn, within = divmod(token, self.interleave)
        local = turn // self.ranks * self.interleave + within
        return turn % self.ranks, local // self.page_size, local % self.page_size


class Cell(NamedTuple):
    """Tokens of one pair of pages, in blocks that follow each other on both sides.

    blocks: (first token in the source page, first token in the target page) of each.
    """

    source_page: int
    target_page: int
    first_token: int
    block: int
    blocks: tuple[tuple[int, int], ...]


class Period(NamedTuple):
    """cells: by (source dcp rank, target dcp rank)."""

    tokens: int
    source_pages: int
    target_pages: int
    cells: dict[tuple[int, int], list[Cell]]


@functools.lru_cache(maxsize=64)
def period_of(source: Dealing, target: Dealing) -> Period:
    tokens = math.lcm(source.page_size * source.ranks, target.page_size * target.ranks)
    # Neither side ends a page or a turn within a block.
    block = math.gcd(source.interleave, target.interleave)
    require(
        tokens // block <= MOST_BLOCKS,
        f"pages of {source.page_size} and {target.page_size} tokens on each of {source.ranks} and "
        f"{target.ranks} ranks, at the source and the target, are alike again after {tokens:,} "
        f"tokens, which are {tokens // block:,} blocks, more than {MOST_BLOCKS:,}; choose page "
        "sizes of which one divides the other",
    )
    found: dict[tuple[int, int], dict[tuple[int, int], list[tuple[int, int, int]]]] = {}
    for token in range(0, tokens, block):
        rank, page, slot = source.place(token)
        to_rank, to_page, to_slot = target.place(token)
        pair = found.setdefault((rank, to_rank), {})
        pair.setdefault((page, to_page), []).append((slot, to_slot, token))
    return Period(
        tokens=tokens,
        source_pages=tokens // (source.page_size * source.ranks),
        target_pages=tokens // (target.page_size * target.ranks),
        cells={
            pair: [
                Cell(
                    source_page=page,
                    target_page=to_page,
                    first_token=blocks[0][2],
                    block=block,
                    blocks=tuple((slot, to_slot) for slot, to_slot, _ in blocks),
                )
                for (page, to_page), blocks in cells.items()
            ]
            for pair, cells in found.items()
        },
    )


def forget_periods() -> None:
    """Drops what earlier plans left here, so that a timing of a plan is that of the first."""
    period_of.cache_clear()


class Phase(NamedTuple):
    """One unit of each period. Page p of the period, at the source, holds it as unit
    p * source_units + source_index, and likewise at the target."""

    first_token: int
    source_page: int
    target_page: int
    source_index: int
    target_index: int


class Shape(NamedTuple):
    """Bytes of one layer, strided alike in all units: row r of unit u lies at
    offset + u * unit + r * row_stride."""

    part: str  # "k", "v", or "kv": both
    row_bytes: int
    num_rows: int
    source_row_stride: int
    target_row_stride: int
    source_offset: int
    target_offset: int
    source_unit: int
    target_unit: int
    source_units: int  # units of a page
    target_units: int
    phases: tuple[Phase, ...]


class Cycle(NamedTuple):
    """How page lists repeat: tokens of a period, and its pages on either side."""

    tokens: int
    source_pages: int
    target_pages: int


class Share(NamedTuple):
    """Periods q with q % of == first: what this source sends where several keep the same bytes."""

    first: int
    of: int


@dataclass(frozen=True)
class KVMove:
    """A row of the table. layers: places in the group's `layers`; heads: first, one past last."""

    group: str
    layers: range
    heads: tuple[int, int]
    source_rank: int
    target_rank: int
    share: Share
    cycle: Cycle
    shape: Shape
    why_packed: str  # empty: written straight from its place to its place
    lands: bool = False  # packed rows are one run at the target: no scatter
    rows_per_write: int = 0  # of packed ones, in a part of the ring; whole units where they land

    @property
    def via(self) -> str:
        return "pack" if self.why_packed else "direct"

    @property
    def unit_bytes(self) -> int:
        return self.shape.row_bytes * self.shape.num_rows


@dataclass(frozen=True)
class KVPlan:
    source: KVLayout
    target: KVLayout
    link: KVLink
    moves: tuple[KVMove, ...]

    def between(self, source_rank: int, target_rank: int) -> tuple[KVMove, ...]:
        pair = (source_rank, target_rank)
        return tuple(move for move in self.moves if (move.source_rank, move.target_rank) == pair)


def kv_plan(
    source: KVLayout,
    target: KVLayout,
    *,
    link: KVLink = CX7,
    source_rank: int | None = None,
    target_rank: int | None = None,
) -> KVPlan:
    """Returns the table for all pairs of ranks, or for those of one source or target rank.

    link: decides which rows are packed. Raises InvalidArgumentError where the two sides do not
    hold the same model.
    """
    require_type("kv_plan: source", source, KVLayout, "a KVLayout")
    require_type("kv_plan: target", target, KVLayout, "a KVLayout")
    require_type("kv_plan: link", link, KVLink, "a KVLink")
    _check_rank("source_rank", source_rank, source)
    _check_rank("target_rank", target_rank, target)
    moves: list[KVMove] = []
    for ours, theirs in _matching_groups(source, target):
        pair = _GroupPair(source, target, ours, theirs, link)
        moves.extend(pair.moves(source_rank, target_rank))
    return KVPlan(source, target, link, tuple(moves))


def _check_rank(name: str, rank: int | None, layout: KVLayout) -> None:
    require(
        rank is None or (type(rank) is int and 0 <= rank < layout.world_size),
        f"kv_plan: {name} is {rank!r}, must be None or 0 to {layout.world_size - 1} "
        f"(tp={layout.tp}, pp={layout.pp})",
    )


def _matching_groups(source: KVLayout, target: KVLayout) -> Iterator[tuple[KVGroup, KVGroup]]:
    names = [sorted(group.name for group in side.groups) for side in (source, target)]
    require(
        names[0] == names[1],
        f"kv_plan: the source has groups {names[0]}, the target {names[1]}; both sides must hold "
        "the same model, with the same names of groups",
    )
    for ours in source.groups:
        theirs = target.group(ours.name)
        for field in ("kind", "layers", "heads", "k_bytes", "v_bytes", "window"):
            here, there = getattr(ours, field), getattr(theirs, field)
            require(
                here == there,
                f"kv_plan: group {ours.name!r}: {field} is {here} at the source and {there} at the "
                "target; both sides must hold the same model in the same type",
            )
        yield ours, theirs


class _GroupPair:
    """Makes the moves of one group. What pairs of ranks have in common is worked out once."""

    def __init__(
        self, source: KVLayout, target: KVLayout, ours: KVGroup, theirs: KVGroup, link: KVLink
    ) -> None:
        self.source, self.target, self.ours, self.theirs = source, target, ours, theirs
        self.link = link
        self.period = period_of(_dealing(source, ours), _dealing(target, theirs))
        self.cycle = Cycle(self.period.tokens, self.period.source_pages, self.period.target_pages)
        self.deals: dict[int, list[int]] = {}  # target dcp ranks that need tokens of a source's
        for rank, to_rank in sorted(self.period.cells):
            self.deals.setdefault(rank, []).append(to_rank)
        self.apart = "layer" in (source.kv_split, target.kv_split)
        self.known: dict[tuple[int, ...], list[Shape]] = {}

    def moves(self, source_rank: int | None, target_rank: int | None) -> Iterator[KVMove]:
        of_stages = [self.target.layers_of(self.theirs, i) for i in range(self.target.pp)]
        for from_rank in _ranks(self.source, source_rank):
            from_layers = self.source.layers_of(self.ours, from_rank // self.source.tp)
            for to_rank in _ranks(self.target, target_rank):
                to_layers = of_stages[to_rank // self.target.tp]
                layers = _overlap(from_layers, to_layers)
                if layers:
                    counts = (len(from_layers), len(to_layers))
                    yield from self._between(from_rank, to_rank, layers, counts)

    def _between(
        self, from_rank: int, to_rank: int, layers: range, num_layers: tuple[int, int]
    ) -> Iterator[KVMove]:
        here = self.source.holding(self.ours, from_rank % self.source.tp)
        there = self.target.holding(self.theirs, to_rank % self.target.tp)
        heads = _overlap(_heads(here), _heads(there))
        if not heads or (here.dcp_rank, there.dcp_rank) not in self.period.cells:
            return
        shares = self._shares(here, there)
        shapes = self._shapes(here, there, heads, num_layers) if shares else []
        for shape in shapes:
            why_packed, lands, rows_per_write = _packing(self.link, shape)
            for share in shares:
                yield KVMove(
                    group=self.ours.name,
                    layers=layers,
                    heads=(heads.start, heads.stop),
                    source_rank=from_rank,
                    target_rank=to_rank,
                    share=share,
                    cycle=self.cycle,
                    shape=shape,
                    why_packed=why_packed,
                    lands=lands,
                    rows_per_write=rows_per_write,
                )

    def _shares(self, here: Holding, there: Holding) -> list[Share]:
        """Targets that need tokens of `here` are numbered, whichever part of them they need."""
        replicas = self.target.replicas(self.theirs)
        deals = self.deals[here.dcp_rank]
        number = deals.index(there.dcp_rank) * replicas + there.replica
        sources = self.source.replicas(self.ours)
        return _shares((sources, len(deals) * replicas), (here.replica, number))

    def _shapes(
        self, here: Holding, there: Holding, heads: range, num_layers: tuple[int, int]
    ) -> list[Shape]:
        first = (heads.start - here.first_head, heads.start - there.first_head)
        key = (*first, len(heads), here.dcp_rank, there.dcp_rank, *num_layers)
        if key not in self.known:
            cells = self.period.cells[here.dcp_rank, there.dcp_rank]
            ours = self.source.parts(self.ours, num_layers[0])
            theirs = self.target.parts(self.theirs, num_layers[1])
            self.known[key] = [
                _shape(streams, first, len(heads), alike)
                for streams in _streams(ours, theirs, apart=self.apart)
                for alike in _alike(cells)
            ]
        return self.known[key]


def _packing(link: KVLink, shape: Shape) -> tuple[str, bool, int]:
    """why_packed, lands, rows_per_write."""
    why = link.why_packed(shape.row_bytes)
    if not why:
        return "", False, 0
    unit_bytes = shape.row_bytes * shape.num_rows
    lands = shape.target_row_stride == shape.row_bytes and link.lands(unit_bytes)
    rows = link.packed_write_bytes // shape.row_bytes
    if lands:
        rows = link.packed_write_bytes // unit_bytes * shape.num_rows
    return why, lands, rows


def _dealing(layout: KVLayout, group: KVGroup) -> Dealing:
    return Dealing(group.page_size, layout.dcp_of(group), layout.interleave_of(group))


def _ranks(layout: KVLayout, only: int | None) -> range:
    return range(layout.world_size) if only is None else range(only, only + 1)


def _heads(holding: Holding) -> range:
    return range(holding.first_head, holding.first_head + holding.num_heads)


def _overlap(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _shares(counts: tuple[int, int], numbers: tuple[int, int]) -> list[Share]:
    """What source `numbers[0]` of `counts[0]` with the same bytes sends to target `numbers[1]`.

    What the targets need is laid end to end and cut into equal lengths, one for each source: every
    source sends as much as the others, to as few targets as possible.
    """
    pieces = math.lcm(*counts)
    of_source, of_target = pieces // counts[0], pieces // counts[1]
    mine = [i for i in range(of_target) if (numbers[1] * of_target + i) // of_source == numbers[0]]
    if len(mine) == of_target:
        return [Share(0, 1)]
    return [Share(i, of_target) for i in mine]


class _Stream(NamedTuple):
    """K, V or both, as a source and a target part and the levels between K and V."""

    name: str
    source: Part
    target: Part
    levels: tuple[Level, ...]


def _streams(ours: tuple[Part, ...], theirs: tuple[Part, ...], *, apart: bool) -> list[_Stream]:
    """K and V as one where they lie alike on both sides."""
    if len(ours) == 1:
        return [_Stream("k", ours[0], theirs[0], ())]
    both = [side[1].offset - side[0].offset for side in (ours, theirs)]
    alike = all(
        side[0]._replace(offset=0, nbytes=0) == side[1]._replace(offset=0, nbytes=0)
        for side in (ours, theirs)
    )
    nbytes = ours[0].nbytes
    if alike and not apart and both == [nbytes, nbytes]:
        total = nbytes + ours[1].nbytes
        pair = [side[0]._replace(nbytes=total) for side in (ours, theirs)]
        return [_Stream("kv", pair[0], pair[1], ())]
    if alike and not apart:  # equal strides, so equal bytes too
        return [_Stream("kv", ours[0], theirs[0], (Level(2, both[0], both[1]),))]
    return [_Stream(name, ours[i], theirs[i], ()) for i, name in enumerate("kv")]


def _alike(cells: list[Cell]) -> list[list[Cell]]:
    """Cells whose blocks lie alike, page and place in it apart."""
    groups: dict[tuple[tuple[int, int], ...], list[Cell]] = {}
    for cell in cells:
        slot, to_slot = cell.blocks[0]
        key = tuple((block - slot, to_block - to_slot) for block, to_block in cell.blocks)
        groups.setdefault(key, []).append(cell)
    return list(groups.values())


def _shape(
    stream: _Stream, first_head: tuple[int, int], num_heads: int, cells: list[Cell]
) -> Shape:
    source, target = stream.source, stream.target
    rows = _rows(stream, num_heads, cells[0])
    from_start = source.offset + first_head[0] * source.head_stride
    to_start = target.offset + first_head[1] * target.head_stride
    units = [  # (cell, source offset, target offset), in the order of tokens, as cells are
        (
            cell,
            from_start + cell.blocks[0][0] * source.token_stride + offset,
            to_start + cell.blocks[0][1] * target.token_stride + to_offset,
        )
        for cell in cells
        for offset, to_offset in rows.offsets
    ]
    base, to_base = min(unit[1] for unit in units), min(unit[2] for unit in units)
    unit_bytes = math.gcd(source.page_stride, *(unit[1] - base for unit in units))
    to_unit_bytes = math.gcd(target.page_stride, *(unit[2] - to_base for unit in units))
    return Shape(
        part=stream.name,
        row_bytes=rows.row_bytes,
        num_rows=rows.num_rows,
        source_row_stride=rows.source_stride,
        target_row_stride=rows.target_stride,
        source_offset=base,
        target_offset=to_base,
        source_unit=unit_bytes,
        target_unit=to_unit_bytes,
        source_units=source.page_stride // unit_bytes,
        target_units=target.page_stride // to_unit_bytes,
        phases=tuple(
            Phase(
                first_token=cell.first_token,
                source_page=cell.source_page,
                target_page=cell.target_page,
                source_index=(offset - base) // unit_bytes,
                target_index=(to_offset - to_base) // to_unit_bytes,
            )
            for cell, offset, to_offset in units
        ),
    )


def _rows(stream: _Stream, num_heads: int, cell: Cell) -> Rows:
    """Rows and offsets of a cell, from its first token of the first head on."""
    source, target = stream.source, stream.target
    slot, to_slot = cell.blocks[0]
    blocks = [
        ((at - slot) * source.token_stride, (to - to_slot) * target.token_stride)
        for at, to in cell.blocks
    ]
    level = progression(blocks)
    return rows_of(
        source.nbytes,
        [
            *stream.levels,
            Level(num_heads, source.head_stride, target.head_stride),
            Level(cell.block, source.token_stride, target.token_stride),
            *([level] if level else []),
        ],
        ((0, 0),) if level else blocks,
    )

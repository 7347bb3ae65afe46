"""What one request adds to a plan: spans of tokens, indices of units, counts. Pure.

A request's pages are one int32 tensor per group and side: page i holds tokens from
i * page_tokens on. Where the decoder has a prefix already, `begin` is its length, and nothing
before it is read or written: its pages may be shared with other requests.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from moe_p2p.errors import require, require_type
from moe_p2p.kv.layout import KVGroup, KVLayout
from moe_p2p.kv.plan import KVMove, KVPlan, Phase

_MOST_INDEX = (1 << 31) - 1
# Units worked out at a time: torch divides larger tensors among threads, and waiting for those
# took 372 ms where the work takes 2.6 (131,072 units, two busy cores); `take` is so at 8,000 units.
_PIECE = 1 << 14


class Span(NamedTuple):
    """Tokens begin to end, without end. Of a state: 0 to 1 is the state, 0 to 0 nothing."""

    begin: int
    end: int


class KVCounts(NamedTuple):
    """What one source sends to one target, over all layers. Both sides know it before it is sent.

    immediates: one by each NIC of the source for each direct request of a layer, after all that it
    carried of it, and for each write of packed rows. They do not depend on where pages lie, so
    writes of neighbouring pages may be merged.
    """

    requests: int
    units: int
    rows: int
    nbytes: int
    immediates: int


def span_of(plan: KVPlan, group: KVGroup, begin: int, end: int, total: int | None = None) -> Span:
    """What a group needs of tokens `begin` to `end` of a request of `total` tokens (None: `end`).

    `begin` must be the start of a target page (`aligned_begin`). A window needs its last tokens
    only, a state is sent with the last chunk.
    """
    total = end if total is None else total
    for name, value in (("begin", begin), ("end", end), ("total", total)):
        require_type(name, value, int, "an int")
    require(
        0 <= begin <= end <= total,
        f"tokens {begin} to {end} of {total}: begin, end and total must be 0 or more and ascend",
    )
    if group.kind == "state":
        return Span(0, int(end == total and end > begin))
    page = plan.target.page_tokens(plan.target.group(group.name))
    require(
        begin % page == 0,
        f"group {group.name!r}: begin={begin} lies within a page of the target, which has {page} "
        f"tokens; pass {begin // page * page}, the start of that page (aligned_begin)",
    )
    if group.window is not None:
        begin = max(begin, (total - group.window) // page * page)
    return Span(min(begin, end), end)


def aligned_begin(target: KVLayout, token: int) -> int:
    """The last token, up to `token`, where a page of every group of the target begins."""
    pages = [target.page_tokens(group) for group in target.groups if group.kind != "state"]
    return token // math.lcm(*pages) * math.lcm(*pages)


def indices(
    move: KVMove, span: Span, source_pages: Tensor, target_pages: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the move's units at the source and at the target, int32, in the order of tokens."""
    shape, cycle = move.shape, move.cycle
    periods = _periods(move, span.begin // cycle.tokens, -(-span.end // cycle.tokens))
    # Units of all these periods, in the order of tokens; those outside of the span are at the ends.
    tokens = [phase.first_token for phase in shape.phases]
    begin = end = 0
    if periods:
        begin = bisect.bisect_left(tokens, span.begin - periods[0] * cycle.tokens)
        end = bisect.bisect_left(tokens, span.end - periods[-1] * cycle.tokens)
        end += (len(periods) - 1) * len(tokens)
    page, to_page, index, to_index = _columns(shape.phases)
    ours = (source_pages, page, cycle.source_pages, index, shape.source_units)
    theirs = (target_pages, to_page, cycle.target_pages, to_index, shape.target_units)
    return (
        _units_of_side(f"group {move.group!r}: source_pages", periods, (begin, end), *ours),
        _units_of_side(f"group {move.group!r}: target_pages", periods, (begin, end), *theirs),
    )


def _units_of_side(
    name: str,
    periods: range,
    kept: tuple[int, int],  # of all units of the periods
    pages: Tensor,
    page_in_period: Tensor,  # [phases]
    pages_of_period: int,
    index_in_page: Tensor,  # [phases]
    units_of_page: int,
) -> Tensor:
    require_type(name, pages, Tensor)
    num_phases, (begin, end) = len(page_in_period), kept
    found = torch.empty(max(end - begin, 0), dtype=torch.int32, device="cpu")
    step = max(_PIECE // num_phases, 1)
    for at in range(0, len(periods) if len(found) else 0, step):
        piece = periods[at : at + step]
        first, last = max(at * num_phases, begin), min((at + len(piece)) * num_phases, end)
        cut = slice(first - at * num_phases, last - at * num_phases)
        period = torch.arange(piece.start, piece.stop, piece.step, device="cpu")[:, None]
        places = (period * pages_of_period + page_in_period).view(-1)[cut]
        _check_list(name, pages, int(places[-1]) if len(places) else -1)
        units = pages.index_select(0, places) * units_of_page
        found[first - begin : last - begin] = units + index_in_page.repeat(len(piece))[cut]
    return found


@functools.lru_cache(maxsize=1024)
def _columns(phases: tuple[Phase, ...]) -> tuple[Tensor, ...]:
    """source_page, target_page, source_index, target_index, each [phases]."""
    table = torch.tensor(phases, dtype=torch.int64, device="cpu").T
    return (*table[1:3], *table[3:].to(torch.int32))


def _check_list(name: str, pages: Tensor, last: int) -> None:
    """Raises unless `pages` is a list with a page `last`; places ascend with tokens."""
    require(
        pages.dtype == torch.int32 and pages.dim() == 1 and len(pages) > last,
        f"{name} is {list(pages.shape)} of {pages.dtype}; this request needs int32 [n] with n at "
        f"least {last + 1}: its pages from its first token on",
    )


def counts(
    plan: KVPlan,
    target_rank: int,
    begin: int,
    end: int,
    total: int | None = None,
    *,
    source_nics: int = 1,
) -> dict[int, KVCounts]:
    """What arrives at `target_rank` for one request, by source rank; sources of nothing are left
    out. source_nics: NICs of each source's engine. Tokens as in `span_of`."""
    require_type("counts: source_nics", source_nics, int, "an int")
    require(source_nics >= 1, f"counts: source_nics is {source_nics}, must be at least 1")
    sums: defaultdict[int, list[int]] = defaultdict(lambda: [0] * len(KVCounts._fields))
    for move in plan.moves:
        if move.target_rank != target_rank:
            continue
        span = span_of(plan, plan.source.group(move.group), begin, end, total)
        units = num_units(move, span)
        if not units:
            continue
        nbytes = units * move.unit_bytes
        rows = units * move.shape.num_rows
        writes = -(-rows // move.rows_per_write) if move.why_packed else 1
        of_layer = (1, units, rows, nbytes, writes * source_nics)
        for i, value in enumerate(of_layer):
            sums[move.source_rank][i] += value * len(move.layers)
    return {source: KVCounts(*values) for source, values in sorted(sums.items())}


def num_units(move: KVMove, span: Span) -> int:
    tokens, units = move.cycle.tokens, 0
    for phase in move.shape.phases:  # in the order of their tokens
        if phase.first_token >= span.end:
            break
        begin = max(-(-(span.begin - phase.first_token) // tokens), 0)
        units += len(_periods(move, begin, -(-(span.end - phase.first_token) // tokens)))
    return units


def _periods(move: KVMove, begin: int, end: int) -> range:
    """Periods `begin` to `end` that are in the move's share."""
    first, of = move.share
    return range(begin + (first - begin) % of, end, of)


def check_pages(plan: KVPlan, num_source_pages: int, num_target_pages: int) -> None:
    """Raises where an index of a unit would not fit int32: once, for the sizes of the two pools."""
    for move in plan.moves:
        for side, pages, units in (
            ("source", num_source_pages, move.shape.source_units),
            ("target", num_target_pages, move.shape.target_units),
        ):
            require(
                pages * units <= _MOST_INDEX,
                f"group {move.group!r}: {pages} {side} pages of {units} units each do not fit "
                f"int32 indices; at most {_MOST_INDEX // units} pages",
            )

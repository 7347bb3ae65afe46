"""Which tokens of a source page are which tokens of a target page. Pure; moe_p2p/kv/plan.py asks.

Pages of the two sides may differ in size, and tokens may be dealt to several ranks on either, so
the pattern repeats only after a *period* of tokens that is whole pages on both. A *cell* is what
one source page and one target page of a period share:

    source pages of 4 tokens, target pages of 6: a period of 12 tokens, cells 0-3 4-5 6-7 8-11
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from moe_p2p.errors import require

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
